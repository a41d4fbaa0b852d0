/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Where functions in assembly begin, and what is in front of them. */
#ifndef _ASM_LINKAGE_H
#define _ASM_LINKAGE_H

#define __ALIGN .p2align 4, 0x90

#endif
