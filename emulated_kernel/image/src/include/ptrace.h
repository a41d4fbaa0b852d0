/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Functions that read saved registers by name, argument or word of the stack, in addition to <asm/ptrace.h>. */
#ifndef _PTRACE_H
#define _PTRACE_H

#include "errno.h"
#include "sched.h"
#include "string.h"
#include "types.h"
#include <asm/ptrace.h>

#define MAX_REG_OFFSET (sizeof(struct pt_regs) - sizeof(unsigned long))
#define profile_pc(regs) instruction_pointer(regs)
#define current_pt_regs() task_pt_regs(current)

/* The offset of the register with this name in struct pt_regs, or -EINVAL. */
static inline int regs_query_register_offset(const char *name)
{
#define RETURN_OFFSET(reg)                                                                             \
	if (!strcmp(name, #reg))                                                                       \
		return offsetof(struct pt_regs, reg);
	FOR_EACH_REGISTER(RETURN_OFFSET)
#undef RETURN_OFFSET
	return -EINVAL;
}

/* The name of the register at an offset of struct pt_regs, or NULL. */
static inline const char *regs_query_register_name(unsigned int offset)
{
#define RETURN_NAME(reg)                                                                               \
	if (offset == offsetof(struct pt_regs, reg))                                                   \
		return #reg;
	FOR_EACH_REGISTER(RETURN_NAME)
#undef RETURN_NAME
	return NULL;
}

/* The register at an offset of struct pt_regs; 0 after the last one. */
static inline unsigned long regs_get_register(struct pt_regs *regs, unsigned int offset)
{
	return offset > MAX_REG_OFFSET ? 0 : *(unsigned long *)((char *)regs + offset);
}

static inline int regs_within_kernel_stack(struct pt_regs *regs, unsigned long addr)
{
	return !((addr ^ kernel_stack_pointer(regs)) & ~(THREAD_SIZE - 1));
}

/* The address of word n of the kernel's stack; NULL after its end. */
static inline unsigned long *regs_get_kernel_stack_nth_addr(struct pt_regs *regs, unsigned int n)
{
	unsigned long *addr = (unsigned long *)kernel_stack_pointer(regs) + n;

	return regs_within_kernel_stack(regs, (unsigned long)addr) ? addr : NULL;
}

/* Word n of the kernel's stack; 0 after its end. */
static inline unsigned long regs_get_kernel_stack_nth(struct pt_regs *regs, unsigned int n)
{
	const unsigned long *addr = regs_get_kernel_stack_nth_addr(regs, n);

	return addr ? *addr : 0;
}

/* Argument n, from 0 on, of the function at whose entry regs were saved; on RISC-V 0 if it is on the stack. */
static inline unsigned long regs_get_kernel_argument(struct pt_regs *regs, unsigned int n)
{
	const unsigned long in_registers[] = { KERNEL_ARGUMENTS(regs) };

	if (n < ARRAY_SIZE(in_registers))
		return in_registers[n];
	return STACKED_KERNEL_ARGUMENT(regs, n - ARRAY_SIZE(in_registers));
}

#endif
