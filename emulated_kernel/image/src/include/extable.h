/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Accesses that may fault, each with its entry in the exception table. */
#ifndef _EXTABLE_H
#define _EXTABLE_H

#ifdef __ASSEMBLY__
#define _ASM_EXTABLE(from, to)          \
	.pushsection __ex_table, "a";   \
	.balign 4;                      \
	.long (from) - .;               \
	.long (to) - .;                 \
	.popsection
#else
#include "types.h"
#include <asm/nofault.h>

#define _ASM_EXTABLE(from, to)                                             \
	".pushsection __ex_table,\"a\"\n.balign 4\n"                       \
	".long (" #from ") - .\n.long (" #to ") - .\n.popsection\n"

/*
 * All return 0, or -EFAULT where the access faulted. It goes on right behind then, so that the fixup
 * lies in the function of the access, which is what the rules of jump optimization rely on.
 */
#define __load_nofault(insns, word, addr) ({                               \
	int _err = -14;                                                    \
	__asm__ __volatile__("1:\t" insns "\n2:\n"                        \
			     _ASM_EXTABLE(1b, 2b)                          \
			     : "+r"(_err), "+r"(word)                      \
			     : "m"(*(addr)));                              \
	_err; })

static __always_inline int __load_u8_nofault(u8 *val, const void *addr)
{
	u32 byte = 0;
	int err = __load_nofault(LOAD_U8_INSNS, byte, (const u8 *)addr);

	*val = (u8)byte;
	return err;
}

static __always_inline int __load_long_nofault(unsigned long *val, const void *addr)
{
	unsigned long word = 0;
	int err = __load_nofault(LOAD_LONG_INSNS, word, (const unsigned long *)addr);

	*val = word;
	return err;
}

/* Bytes that could not be copied. */
unsigned long copy_user_generic(void *to, const void *from, unsigned long n);
unsigned long __clear_user(void *to, unsigned long n);
#endif

#endif
