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

#define syscall_get_nr(regs) ((long)(int)(regs)->a7)
#define syscall_return_value(regs) ((long)(regs)->a0)
#define syscall_set_return_value(regs, val) ((regs)->a0 = (unsigned long)(val))

#endif
