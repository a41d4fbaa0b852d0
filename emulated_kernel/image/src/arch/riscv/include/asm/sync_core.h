/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What makes a hart fetch anew what it has fetched. */
#ifndef _ASM_SYNC_CORE_H
#define _ASM_SYNC_CORE_H

#define serialize() __asm__ __volatile__("fence.i" : : : "memory")

#endif
