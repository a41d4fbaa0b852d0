// SPDX-License-Identifier: GPL-2.0-or-later
// What a task that has not run yet has on its stack.
#include "entry.h"
#include "sched.h"
#include "string.h"
#include <asm/syscall.h>

DEFINE_PER_CPU(struct task_struct *, current_task) = &init_task;

#define inactive_frame_of(p) ((struct inactive_task_frame *)task_pt_regs(p) - 1)

static void notrace init_fork_frame(struct task_struct *p, int (*fn)(void *), void *arg)
{
	struct inactive_task_frame *frame = inactive_frame_of(p);

	memset(frame, 0, sizeof(*frame));
	frame->fn = (unsigned long)fn;
	frame->fn_arg = (unsigned long)arg;
	frame->ret_addr = (unsigned long)ret_from_fork;
	p->thread.sp = (unsigned long)frame;
}

int copy_thread(struct task_struct *p, const struct kernel_clone_args *args)
{
	struct pt_regs *childregs = task_pt_regs(p);

	if (args->fn) {
		memset(childregs, 0, sizeof(*childregs));
	} else {
		*childregs = *task_pt_regs(current);
		syscall_set_return_value(childregs, 0);
	}
	init_fork_frame(p, args->fn, args->fn_arg);
	return 0;
}

/* The same for an adopted task; it fires no probe. */
noinstr void host_init_thread(struct task_struct *p)
{
	struct inactive_task_frame *frame = inactive_frame_of(p);

	__builtin_memset(frame, 0, sizeof(*frame));
	frame->ret_addr = (unsigned long)ret_from_fork;
	p->thread.sp = (unsigned long)frame;
}
