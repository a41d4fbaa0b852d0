/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Order of accesses to memory; which instruction makes it depends on the CPU. */
#ifndef _ASM_BARRIER_H
#define _ASM_BARRIER_H

#include <asm/alternative.h>

#ifdef CONFIG_X86_32
#define __STACK_POINTER "%%esp"
#else
#define __STACK_POINTER "%%rsp"
#endif

#define smp_mb() \
	__asm__ __volatile__(ALTERNATIVE("lock; addl $0, -4(" __STACK_POINTER ")", "mfence", \
					 X86_FEATURE_XMM2) : : : "memory", "cc")

#endif
