/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Pages, the direct map and the kernel map; on i386 the image lies in the direct map. */
#ifndef _ASM_PAGE_H
#define _ASM_PAGE_H

#include "types.h"

#define PAGE_SHIFT 12
#define PAGE_SIZE (1UL << PAGE_SHIFT)
#define PAGE_MASK (~(PAGE_SIZE - 1))
#ifdef CONFIG_X86_32
#define TASK_SIZE_MAX 0xc0000000UL
#else
#define __START_KERNEL_map 0xffffffff80000000UL
#define TASK_SIZE_MAX 0x00007ffffffff000UL
#endif

extern unsigned long page_offset_base;

#define __va(pa) ((void *)((unsigned long)(pa) + page_offset_base))

static __always_inline unsigned long __pa(const void *va)
{
	unsigned long addr = (unsigned long)va;

#ifdef __START_KERNEL_map
	if (addr >= __START_KERNEL_map)
		return addr - __START_KERNEL_map;
#endif
	return addr - page_offset_base;
}

#endif
