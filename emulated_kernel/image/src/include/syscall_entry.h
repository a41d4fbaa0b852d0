/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The way of a system call from its number to its function; inlined, so that its caller is the architecture's entry. */
#ifndef _SYSCALL_ENTRY_H
#define _SYSCALL_ENTRY_H

#include "entry.h"
#include "errno.h"
#include "freezer.h"
#include "host_abi.h"
#include "sched.h"
#include "syscalls.h"
#include "tracepoint.h"
#include <asm/unistd.h>

extern const sys_call_ptr_t sys_call_table[NR_syscalls];

static __always_inline void call_of_table(struct pt_regs *regs, int nr)
{
	trace_sys_enter(regs, nr);
	syscall_set_return_value(regs, sys_call_table[nr](regs));
	trace_sys_exit(regs, syscall_return_value(regs));
}

/* Of Linux, or of the host. */
static __always_inline void do_syscall(struct pt_regs *regs, int nr)
{
	if (likely((unsigned int)nr < NR_syscalls))
		call_of_table(regs, nr);
	else if (nr >= HOST_NR_BASE && nr < HOST_NR_END)
		syscall_set_return_value(regs, host_syscall(regs, nr));
	else
		syscall_set_return_value(regs, -ENOSYS);
	while (need_resched())
		schedule();
	try_to_freeze();
}

#endif
