// SPDX-License-Identifier: GPL-2.0-or-later
// The architecture's share of creating tasks and switching between them.
#include "sched.h"
#include "string.h"
#include <asm/entry.h>

BUILD_BUG_ON(sizeof(struct pt_regs) != PT_REGS_SIZE);
BUILD_BUG_ON(offsetof(struct pt_regs, ax) != PT_AX);
BUILD_BUG_ON(offsetof(struct pt_regs, orig_ax) != PT_ORIG_AX);
BUILD_BUG_ON(offsetof(struct pt_regs, ip) != PT_IP);
BUILD_BUG_ON(offsetof(struct pt_regs, flags) != PT_FLAGS);
BUILD_BUG_ON(offsetof(struct pt_regs, sp) != PT_SP);
BUILD_BUG_ON(sizeof(struct host_frame) != PT_REGS_SIZE + HOST_FRAME_SIZE);
BUILD_BUG_ON(offsetof(struct task_struct, thread.sp) != 0);

DEFINE_PER_CPU(struct task_struct *, current_task) = &init_task;

/* What __switch_to_asm pops from the stack of a task that has not run yet. */
struct inactive_task_frame {
#ifdef CONFIG_X86_32
	unsigned long si, fn_arg, bx, bp;
#else
	unsigned long r15, r14, r13, fn_arg, bx, bp;
#endif
	unsigned long ret_addr;
};

static void notrace init_fork_frame(struct task_struct *p, int (*fn)(void *), void *arg)
{
	struct inactive_task_frame *frame = (struct inactive_task_frame *)task_pt_regs(p) - 1;

	memset(frame, 0, sizeof(*frame));
	frame->bx = (unsigned long)fn;
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
		childregs->ax = 0;
	}
	init_fork_frame(p, args->fn, args->fn_arg);
	return 0;
}

/* The same for an adopted task; it fires no probe. */
noinstr void host_init_thread(struct task_struct *p)
{
	struct inactive_task_frame *frame = (struct inactive_task_frame *)task_pt_regs(p) - 1;

	__builtin_memset(frame, 0, sizeof(*frame));
	frame->ret_addr = (unsigned long)ret_from_fork;
	p->thread.sp = (unsigned long)frame;
}

__visible __kprobes notrace struct task_struct *__switch_to(struct task_struct *prev,
							    struct task_struct *next)
{
	this_cpu_write(current_task, next);
	return prev;
}
