/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Loads that may fault, of %2 into %1, and then 0 into %0. */
#ifndef _ASM_NOFAULT_H
#define _ASM_NOFAULT_H

#define LOAD_U8_INSNS "movzbl %2, %1\n\txorl %0, %0"
#define LOAD_LONG_INSNS "mov %2, %1\n\txorl %0, %0"

#endif
