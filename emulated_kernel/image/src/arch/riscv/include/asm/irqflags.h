/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The interrupt flag of the CPU. */
#ifndef _ASM_IRQFLAGS_H
#define _ASM_IRQFLAGS_H

#include "types.h"
#include <asm/csr.h>

static __always_inline unsigned long arch_local_save_flags(void)
{
	unsigned long flags;

	__asm__ __volatile__("csrr %0, sstatus" : "=r"(flags) : : "memory");
	return flags;
}

static __always_inline void local_irq_disable(void)
{
	__asm__ __volatile__("csrci sstatus, %0" : : "i"(SR_SIE) : "memory");
}

static __always_inline void local_irq_enable(void)
{
	__asm__ __volatile__("csrsi sstatus, %0" : : "i"(SR_SIE) : "memory");
}

static __always_inline bool irqs_disabled_flags(unsigned long flags)
{
	return !(flags & SR_SIE);
}

static __always_inline unsigned long arch_local_irq_save(void)
{
	unsigned long flags;

	__asm__ __volatile__("csrrci %0, sstatus, %1" : "=r"(flags) : "i"(SR_SIE) : "memory");
	return flags;
}

static __always_inline void arch_local_irq_restore(unsigned long flags)
{
	__asm__ __volatile__("csrs sstatus, %0" : : "r"(flags & SR_SIE) : "memory");
}

#define local_irq_save(flags) ((flags) = arch_local_irq_save())
#define local_irq_restore(flags) arch_local_irq_restore(flags)
#define irqs_disabled() irqs_disabled_flags(arch_local_save_flags())
/* The pause hint, which is a fence without effect where it isn't known. */
#define cpu_relax() __asm__ __volatile__(".word 0x0100000f" : : : "memory")

#endif
