/* SPDX-License-Identifier: GPL-2.0-or-later */
/* A question to the host in the middle of C code: a breakpoint that it knows by its symbol. */
#ifndef _ASM_HOST_TRAP_H
#define _ASM_HOST_TRAP_H

/* Where a function has its arguments. */
#ifdef __x86_64__
#define HOST_TRAP_ARGS(a, b) "D"(a), "S"(b)
#else
#define HOST_TRAP_ARGS(a, b) "0"(a), "d"(b)
#endif

/* The answer, from a and b. */
#define HOST_TRAP(symbol, a, b) ({                                         \
	unsigned long _answer;                                             \
	__asm__ __volatile__(".globl " #symbol "\n" #symbol ":\n\tint3"    \
			     : "=a"(_answer) : HOST_TRAP_ARGS(a, b)        \
			     : "memory");                                  \
	_answer; })

#endif
