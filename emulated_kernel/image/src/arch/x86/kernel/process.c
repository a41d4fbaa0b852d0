// SPDX-License-Identifier: GPL-2.0-or-later
// The architecture's share of switching between tasks.
#include "entry.h"
#include "sched.h"

BUILD_BUG_ON(sizeof(struct pt_regs) != PT_REGS_SIZE);
BUILD_BUG_ON(offsetof(struct pt_regs, ax) != PT_AX);
BUILD_BUG_ON(offsetof(struct pt_regs, orig_ax) != PT_ORIG_AX);
BUILD_BUG_ON(offsetof(struct pt_regs, ip) != PT_IP);
BUILD_BUG_ON(offsetof(struct pt_regs, flags) != PT_FLAGS);
BUILD_BUG_ON(offsetof(struct pt_regs, sp) != PT_SP);
BUILD_BUG_ON(sizeof(struct host_frame) != PT_REGS_SIZE + HOST_FRAME_SIZE);
BUILD_BUG_ON(offsetof(struct task_struct, thread.sp) != 0);

__visible __kprobes notrace struct task_struct *__switch_to(struct task_struct *prev,
							    struct task_struct *next)
{
	this_cpu_write(current_task, next);
	return prev;
}
