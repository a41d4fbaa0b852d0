/* SPDX-License-Identifier: GPL-2.0-or-later */
/* A five-byte nop and its jump table entry: nop, target and key, each relative to its own address. */
#ifndef _ASM_JUMP_LABEL_H
#define _ASM_JUMP_LABEL_H

#ifdef CONFIG_X86_32
#define JUMP_TABLE_WORD ".long"
#define JUMP_TABLE_ALIGN ".balign 4"
#else
#define JUMP_TABLE_WORD ".quad"
#define JUMP_TABLE_ALIGN ".balign 8"
#endif

static __always_inline bool arch_static_branch(struct static_key *key)
{
	__asm__ goto("1:\t.byte 0x0f, 0x1f, 0x44, 0x00, 0x00\n"
		     ".pushsection __jump_table, \"a\"\n"
		     JUMP_TABLE_ALIGN "\n"
		     ".long 1b - ., %l[l_yes] - .\n"
		     JUMP_TABLE_WORD " %c0 - .\n"
		     ".popsection\n"
		     : : "i"(key) : : l_yes);
	return false;
l_yes:
	return true;
}

#endif
