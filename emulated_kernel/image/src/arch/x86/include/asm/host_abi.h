/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What only this architecture tells the host of itself: where an interrupt enters, and what it leaves. */
#ifndef _ASM_HOST_ABI_H
#define _ASM_HOST_ABI_H

DECLARE_PER_CPU(unsigned long, host_cr2);
void asm_host_interrupt(void);

#define ARCH_ABI_ENTRIES PERCPU(host_cr2, "host_cr2"), ADDRESS(asm_host_interrupt),

#endif
