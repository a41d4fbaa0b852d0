/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The trapping instruction of BUG() and its table entry. */
#ifndef _ASM_BUG_H
#define _ASM_BUG_H

#define BUG_INSN(flags)                                                    \
	__asm__ __volatile__("1:\tud2\n"                                   \
			     ".pushsection __bug_table,\"aw\"\n"           \
			     "2:\t.long 1b - .\n"                          \
			     "\t.long %c0 - .\n"                           \
			     "\t.word %c1, %c2\n"                          \
			     ".popsection"                                 \
			     : : "i"(__FILE__), "i"(__LINE__), "i"(flags))
#define BUG_INSN_LEN 2
#define VECTOR_BUG VECTOR_INVALID_OPCODE

#endif
