/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Arguments of a system call in struct pt_regs. */
#ifndef _ASM_SYSCALL_H
#define _ASM_SYSCALL_H

#include <asm/ptrace.h>

#ifdef CONFIG_X86_32
#define SYSCALL_SYMBOL(name) __ia32_sys_##name

static __always_inline unsigned long syscall_arg(const struct pt_regs *regs, int n)
{
	switch (n) {
	case 0: return regs->bx;
	case 1: return regs->cx;
	case 2: return regs->dx;
	case 3: return regs->si;
	case 4: return regs->di;
	default: return regs->bp;
	}
}
#else
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

#define syscall_get_nr(regs) ((long)(int)(regs)->orig_ax)
#define syscall_return_value(regs) ((long)(regs)->ax)
#define syscall_set_return_value(regs, val) ((regs)->ax = (unsigned long)(val))

#endif
