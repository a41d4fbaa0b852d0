/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Loads that may fault, of %2 into %1, and then 0 into %0. */
#ifndef _ASM_NOFAULT_H
#define _ASM_NOFAULT_H

#define LOAD_U8_INSNS "lbu %1, %2\n\tli %0, 0"
#define LOAD_LONG_INSNS "ld %1, %2\n\tli %0, 0"

#endif
