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

struct task_struct;
DECLARE_PER_CPU(struct task_struct *, current_task);
register struct task_struct *riscv_current_is_tp __asm__("tp");

static __always_inline struct task_struct *get_current(void)
{
	return riscv_current_is_tp;
}
#define current get_current()

#endif
