/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The trapping instruction of BUG() and its table entry. */
#ifndef _ASM_BUG_H
#define _ASM_BUG_H

#define BUG_INSN(flags)                                                    \
	__asm__ __volatile__("1:\tebreak\n"                                \
			     ".pushsection __bug_table,\"aw\"\n"           \
			     "2:\t.word 1b - .\n"                          \
			     "\t.word %0 - .\n"                            \
			     "\t.half %1, %2\n"                            \
			     ".popsection"                                 \
			     : : "i"(__FILE__), "i"(__LINE__), "i"(flags))
#ifdef CONFIG_RISCV_ISA_C
#define BUG_INSN_LEN 2
#else
#define BUG_INSN_LEN 4
#endif

#endif
