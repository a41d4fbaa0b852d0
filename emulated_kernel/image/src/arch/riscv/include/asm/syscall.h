/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Arguments of a system call in struct pt_regs. */
#ifndef _ASM_SYSCALL_H
#define _ASM_SYSCALL_H

#include <asm/ptrace.h>

/* Linux: since 6.6; its functions took their arguments in registers before. */
#define SYSCALL_SYMBOL(name) __riscv_sys_##name

static __always_inline unsigned long syscall_arg(const struct pt_regs *regs, int n)
{
	return n ? (&regs->a0)[n] : regs->orig_a0;
}

/* All six, whether the call has them or not. */
static __always_inline void syscall_get_arguments(const struct pt_regs *regs, unsigned long *args)
{
	int i;

	for (i = 0; i < 6; i++)
		args[i] = syscall_arg(regs, i);
}

static __always_inline long syscall_get_nr(const struct pt_regs *regs)
{
	return (int)regs->a7;
}

#endif
