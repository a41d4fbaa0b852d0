/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The interrupt flag of the CPU. */
#ifndef _ASM_IRQFLAGS_H
#define _ASM_IRQFLAGS_H

#include "types.h"

#define X86_EFLAGS_TF 0x100UL
#define X86_EFLAGS_IF 0x200UL

static __always_inline unsigned long arch_local_save_flags(void)
{
	unsigned long flags;

	__asm__ __volatile__("pushf; pop %0" : "=rm"(flags) : : "memory");
	return flags;
}

static __always_inline void local_irq_disable(void)
{
	__asm__ __volatile__("cli" : : : "memory");
}

static __always_inline void local_irq_enable(void)
{
	__asm__ __volatile__("sti" : : : "memory");
}

static __always_inline bool irqs_disabled_flags(unsigned long flags)
{
	return !(flags & X86_EFLAGS_IF);
}

static __always_inline void arch_local_irq_restore(unsigned long flags)
{
	if (!irqs_disabled_flags(flags))
		local_irq_enable();
	else
		local_irq_disable();
}

#define local_irq_save(flags) do {                                         \
	(flags) = arch_local_save_flags();                                 \
	local_irq_disable();                                               \
} while (0)
#define local_irq_restore(flags) arch_local_irq_restore(flags)
#define irqs_disabled() irqs_disabled_flags(arch_local_save_flags())
#define cpu_relax() __asm__ __volatile__("pause" : : : "memory")

#endif
