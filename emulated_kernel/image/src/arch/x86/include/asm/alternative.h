/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Instructions that are replaced at boot where the CPU has better ones. */
#ifndef _ASM_ALTERNATIVE_H
#define _ASM_ALTERNATIVE_H

#define X86_FEATURE_XMM2 26

/* The place is as long as the longer of both. */
#define ALTERNATIVE(oldinstr, newinstr, feature) __ALTERNATIVE(oldinstr, newinstr, feature)
#define __ALTERNATIVE(oldinstr, newinstr, feature)                                          \
	"661:\n\t" oldinstr "\n662:\n"                                                     \
	".skip -(((665f - 664f) - (662b - 661b)) > 0) * ((665f - 664f) - (662b - 661b)), 0x90\n" \
	"663:\n"                                                                            \
	".pushsection .altinstructions, \"a\"\n"                                             \
	"\t.long 661b - .\n\t.long 664f - .\n\t.word " #feature "\n"            \
	"\t.byte 663b - 661b, 665f - 664f\n"                                                \
	".popsection\n"                                                                     \
	".pushsection .altinstr_replacement, \"ax\"\n"                                       \
	"664:\n\t" newinstr "\n665:\n"                                                      \
	".popsection\n"

#endif
