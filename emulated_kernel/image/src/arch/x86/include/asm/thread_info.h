/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What the architecture keeps of a task, and the current task. */
#ifndef _ASM_THREAD_INFO_H
#define _ASM_THREAD_INFO_H

#include <asm/page.h>
#include <asm/percpu.h>
#include <asm/ptrace.h>

struct thread_struct {
	unsigned long sp; /* saved stack pointer while another task runs */
};

/* What __switch_to_asm pops from the stack of a task that has not run yet. */
struct inactive_task_frame {
#ifdef CONFIG_X86_32
	unsigned long si, fn_arg, fn, bp;
#else
	unsigned long r15, r14, r13, fn_arg, fn, bp;
#endif
	unsigned long ret_addr;
};

struct task_struct;
DECLARE_PER_CPU(struct task_struct *, current_task);

static __always_inline struct task_struct *get_current(void)
{
	struct task_struct *task;

	__asm__("mov %%" __PERCPU_SEG ":%P1, %0" : "=r"(task) : "i"(&current_task), "m"(current_task));
	return task;
}
#define current get_current()

#endif
