// SPDX-License-Identifier: GPL-2.0-or-later
// System calls: from the number to the table of Linux or to the host's own.
#include "errno.h"
#include "host_abi.h"
#include "sched.h"
#include "syscalls.h"
#include <asm/entry.h>
#include <asm/unistd.h>

long __x64_sys_ni_syscall(const struct pt_regs *regs);

#define __SYSCALL(nr, name) long __x64_sys_##name(const struct pt_regs *regs);
__SYSCALLS
#undef __SYSCALL

/* The later entries of the host's calls and of Linux override the default. */
#pragma GCC diagnostic ignored "-Woverride-init"
const sys_call_ptr_t sys_call_table[NR_syscalls] = {
	[0 ... NR_syscalls - 1] = __x64_sys_ni_syscall,
#define __SYSCALL(nr, name) [nr] = __x64_sys_##name,
	__SYSCALLS
#undef __SYSCALL
};

SYSCALL_DEFINE0(ni_syscall)
{
	return -ENOSYS;
}

static __always_inline bool do_syscall_x64(struct pt_regs *regs, int nr)
{
	unsigned int unr = nr;

	if (likely(unr < NR_syscalls)) {
		regs->ax = sys_call_table[unr](regs);
		return true;
	}
	return false;
}

static noinstr void syscall_exit_to_user_mode(void)
{
	while (need_resched())
		schedule();
}

__visible noinstr void do_syscall_64(struct pt_regs *regs, int nr)
{
	if (!do_syscall_x64(regs, nr) && nr >= HOST_NR_BASE && nr < HOST_NR_END)
		regs->ax = host_syscall(regs, nr);
	syscall_exit_to_user_mode();
}
