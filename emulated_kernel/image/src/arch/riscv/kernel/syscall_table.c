// SPDX-License-Identifier: GPL-2.0-or-later
// System calls: from the number to the table of Linux or to the host's own.
#include "errno.h"
#include "host_abi.h"
#include "sched.h"
#include "syscalls.h"
#include "tracepoint.h"
#include <asm/entry.h>
#include <asm/unistd.h>

long sys_ni_syscall(void);
long SYSCALL_SYMBOL(ni_syscall)(const struct pt_regs *regs);

#define __SYSCALL(nr, name) long SYSCALL_SYMBOL(name)(const struct pt_regs *regs);
__SYSCALLS
#undef __SYSCALL

/* The later entries override the default. */
#pragma GCC diagnostic ignored "-Woverride-init"
const sys_call_ptr_t sys_call_table[NR_syscalls] = {
	[0 ... NR_syscalls - 1] = SYSCALL_SYMBOL(ni_syscall),
#define __SYSCALL(nr, name) [nr] = SYSCALL_SYMBOL(name),
	__SYSCALLS
#undef __SYSCALL
};

#define __SYSCALL(nr, name) extern const struct syscall_metadata __syscall_meta_##name;
__SYSCALLS
#undef __SYSCALL

/* Ended by NULL. */
const struct syscall_metadata *const syscalls_metadata[] __used = {
#define __SYSCALL(nr, name) &__syscall_meta_##name,
	__SYSCALLS
#undef __SYSCALL
	NULL,
};

noinline long sys_ni_syscall(void)
{
	return -ENOSYS;
}

SYSCALL_DEFINE0(ni_syscall)
{
	return sys_ni_syscall();
}

static __always_inline void syscall_handler(struct pt_regs *regs, int nr)
{
	unsigned int unr = nr;

	regs->a0 = -ENOSYS;
	if (likely(unr < NR_syscalls)) {
		trace_sys_enter(regs, nr);
		regs->a0 = sys_call_table[unr](regs);
		trace_sys_exit(regs, regs->a0);
	} else if (nr >= HOST_NR_BASE && nr < HOST_NR_END) {
		regs->a0 = host_syscall(regs, nr);
	}
}

__visible noinstr void do_trap_ecall_u(struct pt_regs *regs)
{
	regs->epc += 4;
	syscall_handler(regs, (int)regs->a7);
	while (need_resched())
		schedule();
}
