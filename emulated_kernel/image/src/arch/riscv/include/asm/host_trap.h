/* SPDX-License-Identifier: GPL-2.0-or-later */
/* A question to the host in the middle of C code: a breakpoint that it knows by its symbol, in entry.S. */
#ifndef _ASM_HOST_TRAP_H
#define _ASM_HOST_TRAP_H

/* The answer, from a and b. The compiler may make several copies of code, but there is one symbol. */
#define HOST_TRAP(symbol, a, b) ({                                         \
	unsigned long symbol(unsigned long, unsigned long);                \
	symbol((unsigned long)(a), (unsigned long)(b)); })

#endif
