// SPDX-License-Identifier: GPL-2.0-or-later
// The table of system calls; what interrupts see to on their way in and out.
#include "entry.h"
#include "errno.h"
#include "freezer.h"
#include "host_abi.h"
#include "sched.h"
#include "syscalls.h"
#include "tracepoint.h"
#include <asm/unistd.h>

long sys_ni_syscall(void);
long SYSCALL_SYMBOL(ni_syscall)(const struct pt_regs *regs);

#define __SYSCALL(nr, name) long SYSCALL_SYMBOL(name)(const struct pt_regs *regs);
__SYSCALLS
#undef __SYSCALL

/* The later entries of the host's calls and of Linux override the default. */
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

/* An unanswered hypercall is asked again; idling ends. */
noinstr void host_restart_hypercall(struct pt_regs *regs)
{
	unsigned long ip = instruction_pointer(regs);

	if (ip == (unsigned long)host_user_resume)
		ip = (unsigned long)host_user_hlt;
	else if (ip == (unsigned long)host_hypercall_resume)
		ip = (unsigned long)host_hypercall_hlt;
	else if (ip == (unsigned long)host_idle_hlt)
		ip = (unsigned long)host_idle_resume;
	instruction_pointer_set(regs, ip);
	if (ip == (unsigned long)host_user_hlt)
		set_user_mode(regs);
}

static noinstr void irqentry_exit_to_user_mode(void)
{
	bool was_frozen;

	do {
		while (need_resched()) {
			local_irq_enable();
			schedule();
			local_irq_disable();
		}
		local_irq_enable();
		was_frozen = try_to_freeze();
		local_irq_disable();
	} while (was_frozen);
}

noinstr void irqentry_exit(struct pt_regs *regs)
{
	if (user_mode(regs))
		irqentry_exit_to_user_mode();
	else if (!regs_irqs_disabled(regs) && !preempt_count() && need_resched())
		preempt_schedule_irq();
}
