/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Faulting accesses with their exception table entries. */
#ifndef _ASM_UACCESS_H
#define _ASM_UACCESS_H

#ifdef __ASSEMBLY__
#define _ASM_EXTABLE(from, to)          \
	.pushsection __ex_table, "a";   \
	.balign 4;                      \
	.word (from) - .;               \
	.word (to) - .;                 \
	.popsection
#else
#include "types.h"

#define _ASM_EXTABLE(from, to)                                             \
	".pushsection __ex_table,\"a\"\n.balign 4\n"                       \
	".word (" #from ") - .\n.word (" #to ") - .\n.popsection\n"

/*
 * Both return 0, or -EFAULT where the access faulted. It goes on right behind then, so that the fixup
 * lies in the function of the access, which is what the rules of jump optimization rely on.
 */
static __always_inline int __load_u8_nofault(u8 *val, const void *addr)
{
	int err = -14;
	unsigned long byte = 0;

	__asm__ __volatile__("1:\tlbu %1, %2\n\tli %0, 0\n2:\n"
			     _ASM_EXTABLE(1b, 2b)
			     : "+r"(err), "+r"(byte)
			     : "m"(*(const u8 *)addr));
	*val = (u8)byte;
	return err;
}

static __always_inline int __load_long_nofault(unsigned long *val, const void *addr)
{
	int err = -14;
	unsigned long word = 0;

	__asm__ __volatile__("1:\tld %1, %2\n\tli %0, 0\n2:\n"
			     _ASM_EXTABLE(1b, 2b)
			     : "+r"(err), "+r"(word)
			     : "m"(*(const unsigned long *)addr));
	*val = word;
	return err;
}

/* Bytes that could not be copied. */
unsigned long copy_user_generic(void *to, const void *from, unsigned long n);
unsigned long __clear_user(void *to, unsigned long n);
#endif

#endif
