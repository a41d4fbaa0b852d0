/* SPDX-License-Identifier: GPL-2.0-or-later */
/* A four-byte nop and its jump table entry: nop, target and key, each relative to its own address. */
#ifndef _ASM_JUMP_LABEL_H
#define _ASM_JUMP_LABEL_H

static __always_inline bool arch_static_branch(struct static_key *key)
{
	__asm__ goto(".option push\n"
		     ".option norvc\n"
		     "1:\tnop\n"
		     ".option pop\n"
		     ".pushsection __jump_table, \"a\"\n"
		     ".balign 8\n"
		     ".word 1b - ., %l[l_yes] - .\n"
		     ".dword %0 - .\n"
		     ".popsection\n"
		     : : "i"(key) : : l_yes);
	return false;
l_yes:
	return true;
}

#endif
