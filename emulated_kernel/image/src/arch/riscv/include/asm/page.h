/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Pages, the direct map and the kernel map. */
#ifndef _ASM_PAGE_H
#define _ASM_PAGE_H

#include "types.h"

#define PAGE_SHIFT 12
#define PAGE_SIZE (1UL << PAGE_SHIFT)
#define PAGE_MASK (~(PAGE_SIZE - 1))
#define KERNEL_LINK_ADDR 0xffffffff80000000UL
/* The lower half of Sv39. */
#define TASK_SIZE_MAX 0x0000004000000000UL

extern unsigned long page_offset_base;

#define __va(pa) ((void *)((unsigned long)(pa) + page_offset_base))

static __always_inline unsigned long __pa(const void *va)
{
	unsigned long addr = (unsigned long)va;

	return addr - (addr >= KERNEL_LINK_ADDR ? KERNEL_LINK_ADDR : page_offset_base);
}

#endif
