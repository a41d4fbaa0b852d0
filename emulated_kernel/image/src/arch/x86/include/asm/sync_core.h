/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What makes a CPU fetch anew what it has fetched. */
#ifndef _ASM_SYNC_CORE_H
#define _ASM_SYNC_CORE_H

static __always_inline void serialize(void)
{
	u32 ax = 0, bx, cx = 0, dx;

	__asm__ __volatile__("cpuid" : "+a"(ax), "=b"(bx), "+c"(cx), "=d"(dx) : : "memory");
}

#endif
