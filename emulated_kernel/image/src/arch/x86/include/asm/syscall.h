/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Arguments of a system call in struct pt_regs. */
#ifndef _ASM_SYSCALL_H
#define _ASM_SYSCALL_H

#include <asm/ptrace.h>

#define SYSCALL_SYMBOL(name) __x64_sys_##name

static __always_inline unsigned long syscall_arg(const struct pt_regs *regs, int n)
{
	switch (n) {
	case 0: return regs->di;
	case 1: return regs->si;
	case 2: return regs->dx;
	case 3: return regs->r10;
	case 4: return regs->r8;
	default: return regs->r9;
	}
}

#endif
