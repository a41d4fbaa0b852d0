/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What only this architecture tells the host of itself: nothing, the CPU knows where traps go. */
#ifndef _ASM_HOST_ABI_H
#define _ASM_HOST_ABI_H

#define ARCH_ABI_ENTRIES

#endif
