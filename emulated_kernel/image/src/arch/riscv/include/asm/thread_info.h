/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What the architecture keeps of a task, and the current task, which tp points to. */
#ifndef _ASM_THREAD_INFO_H
#define _ASM_THREAD_INFO_H

#include <asm/page.h>
#include <asm/percpu.h>
#include <asm/ptrace.h>

struct thread_struct {
	unsigned long sp; /* saved stack pointer while another task runs */
};

/* What __switch_to_asm loads from the stack of a task that has not run yet. */
struct inactive_task_frame {
	unsigned long ret_addr;
	unsigned long fn, fn_arg; /* s0, s1 */
	unsigned long s2, s3, s4, s5, s6, s7, s8, s9, s10, s11;
	unsigned long pad;
};

struct task_struct;
DECLARE_PER_CPU(struct task_struct *, current_task);
register struct task_struct *riscv_current_is_tp __asm__("tp");

static __always_inline struct task_struct *get_current(void)
{
	return riscv_current_is_tp;
}
#define current get_current()

#endif
