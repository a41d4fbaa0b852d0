/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The saved registers of an interrupted context, in the order of Linux. */
#ifndef _ASM_PTRACE_H
#define _ASM_PTRACE_H

#include "types.h"
#include <asm/irqflags.h>

typedef u32 kprobe_opcode_t;

struct pt_regs {
	unsigned long epc, ra, sp, gp, tp, t0, t1, t2, s0, s1;
	unsigned long a0, a1, a2, a3, a4, a5, a6, a7;
	unsigned long s2, s3, s4, s5, s6, s7, s8, s9, s10, s11;
	unsigned long t3, t4, t5, t6;
	unsigned long status, badaddr, cause;
	unsigned long orig_a0; /* a0 before a system call */
};

#define user_mode(regs) (((regs)->status & SR_SPP) == 0)
#define set_user_mode(regs) ((regs)->status &= ~SR_SPP)
#define instruction_pointer(regs) ((regs)->epc)
#define instruction_pointer_set(regs, val) ((regs)->epc = (val))
#define kernel_stack_pointer(regs) ((regs)->sp)
#define frame_pointer(regs) ((regs)->s0)
#define regs_return_value(regs) ((regs)->a0)
#define regs_irqs_disabled(regs) (!((regs)->status & SR_SPIE))

/* Argument n, from 0 on, of the function at whose entry regs were saved; 0 if it is on the stack. */
static inline unsigned long regs_get_kernel_argument(struct pt_regs *regs, unsigned int n)
{
	return n < 8 ? (&regs->a0)[n] : 0;
}

#endif
