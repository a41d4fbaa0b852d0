/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The saved registers of an interrupted context, in the order of Linux. */
#ifndef _ASM_PTRACE_H
#define _ASM_PTRACE_H

#include "types.h"
#include <asm/irqflags.h>

typedef u8 kprobe_opcode_t;

#ifdef CONFIG_X86_32
/* The segment registers are stored as words, with zeros above. */
struct pt_regs {
	unsigned long bx, cx, dx, si, di, bp, ax, ds, es, fs, gs;
	unsigned long orig_ax; /* system call number or error code */
	unsigned long ip, cs, flags, sp, ss;
};

#define __KERNEL_CS 0x60
#define __KERNEL_DS 0x68
#define __USER_CS 0x73
#define __USER_DS 0x7b
#define __KERNEL_PERCPU 0xd8

#define FOR_EACH_REGISTER(X)                                                                           \
	X(bx) X(cx) X(dx) X(si) X(di) X(bp) X(ax) X(ds) X(es) X(fs) X(gs)                              \
	X(orig_ax) X(ip) X(cs) X(flags) X(sp) X(ss)
#define KERNEL_ARGUMENTS(regs) (regs)->ax, (regs)->dx, (regs)->cx
#define v8086_mode(regs) ((regs)->flags & 0x00020000)
#define user_64bit_mode(regs) false
#define any_64bit_mode(regs) false
#else
struct pt_regs {
	unsigned long r15, r14, r13, r12, bp, bx;
	unsigned long r11, r10, r9, r8, ax, cx, dx, si, di;
	unsigned long orig_ax; /* system call number or error code */
	unsigned long ip, cs, flags, sp, ss;
};

#define __KERNEL_CS 0x10
#define __KERNEL_DS 0x18
#define __USER_DS 0x2b
#define __USER_CS 0x33

#define FOR_EACH_REGISTER(X)                                                                           \
	X(r15) X(r14) X(r13) X(r12) X(bp) X(bx) X(r11) X(r10) X(r9) X(r8) X(ax) X(cx) X(dx) X(si) X(di) \
	X(orig_ax) X(ip) X(cs) X(flags) X(sp) X(ss)
#define KERNEL_ARGUMENTS(regs) (regs)->di, (regs)->si, (regs)->dx, (regs)->cx, (regs)->r8, (regs)->r9
#define v8086_mode(regs) 0
#define user_64bit_mode(regs) ((regs)->cs == __USER_CS)
#define any_64bit_mode(regs) (!user_mode(regs) || user_64bit_mode(regs))
#endif
/* The return address comes first on the stack. */
#define STACKED_KERNEL_ARGUMENT(regs, n) regs_get_kernel_stack_nth(regs, 1 + (n))

/* What asm_host_interrupt has on the stack: the saved registers below the host's four words. */
struct host_frame {
	struct pt_regs regs;
	unsigned long vector;
	unsigned long error_code;
	unsigned long flags;
	unsigned long ip;
};

#define user_mode(regs) (((regs)->cs & 3) != 0)
#define set_user_mode(regs) ((regs)->cs = __USER_CS)
#define instruction_pointer(regs) ((regs)->ip)
#define instruction_pointer_set(regs, val) ((regs)->ip = (val))
#define kernel_stack_pointer(regs) ((regs)->sp)
#define user_stack_pointer(regs) ((regs)->sp)
#define user_stack_pointer_set(regs, val) ((regs)->sp = (val))
#define frame_pointer(regs) ((regs)->bp)
#define regs_return_value(regs) ((regs)->ax)
#define regs_set_return_value(regs, val) ((regs)->ax = (val))
#define regs_irqs_disabled(regs) irqs_disabled_flags((regs)->flags)

#endif
