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

#define FOR_EACH_REGISTER(X)                                                                           \
	X(epc) X(ra) X(sp) X(gp) X(tp) X(t0) X(t1) X(t2) X(s0) X(s1)                                   \
	X(a0) X(a1) X(a2) X(a3) X(a4) X(a5) X(a6) X(a7)                                                \
	X(s2) X(s3) X(s4) X(s5) X(s6) X(s7) X(s8) X(s9) X(s10) X(s11)                                  \
	X(t3) X(t4) X(t5) X(t6) X(status) X(badaddr) X(cause) X(orig_a0)
#define KERNEL_ARGUMENTS(regs)                                                                         \
	(regs)->a0, (regs)->a1, (regs)->a2, (regs)->a3, (regs)->a4, (regs)->a5, (regs)->a6, (regs)->a7
/* Linux does not read arguments from the stack. */
#define STACKED_KERNEL_ARGUMENT(regs, n) ((void)(n), 0)

#define user_mode(regs) (((regs)->status & SR_SPP) == 0)
#define set_user_mode(regs) ((regs)->status &= ~SR_SPP)
#define instruction_pointer(regs) ((regs)->epc)
#define instruction_pointer_set(regs, val) ((regs)->epc = (val))
#define kernel_stack_pointer(regs) ((regs)->sp)
#define user_stack_pointer(regs) ((regs)->sp)
#define user_stack_pointer_set(regs, val) ((regs)->sp = (val))
#define frame_pointer(regs) ((regs)->s0)
#define frame_pointer_set(regs, val) ((regs)->s0 = (val))
#define regs_return_value(regs) ((regs)->a0)
#define regs_set_return_value(regs, val) ((regs)->a0 = (val))
#define regs_irqs_disabled(regs) (!((regs)->status & SR_SPIE))

#endif
