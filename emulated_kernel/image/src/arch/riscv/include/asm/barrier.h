/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Order of accesses to memory. */
#ifndef _ASM_BARRIER_H
#define _ASM_BARRIER_H

#define smp_mb() __asm__ __volatile__("fence rw, rw" : : : "memory")

#endif
