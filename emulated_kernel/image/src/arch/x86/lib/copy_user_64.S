/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Copies that survive a fault and say how much is left. */
#define __ASSEMBLY__
#include "linkage.h"
#include "extable.h"

	.text
/* rdi = to, rsi = from, rdx = bytes; rax = bytes not copied. */
SYM_FUNC_START(copy_user_generic)
	movq	%rdx, %rcx
	shrq	$3, %rcx
	andl	$7, %edx
1:	rep movsq
	movl	%edx, %ecx
2:	rep movsb
	xorl	%eax, %eax
	ret
3:	leaq	(%rdx, %rcx, 8), %rcx
	/* The word that faulted may begin in a good page: go on by bytes. */
4:	rep movsb
5:	movq	%rcx, %rax
	ret
	_ASM_EXTABLE(1b, 3b)
	_ASM_EXTABLE(2b, 5b)
	_ASM_EXTABLE(4b, 5b)
SYM_FUNC_END(copy_user_generic)

/* rdi = to, rsi = bytes; rax = bytes not cleared. */
SYM_FUNC_START(__clear_user)
	movq	%rsi, %rcx
	xorl	%eax, %eax
1:	rep stosb
2:	movq	%rcx, %rax
	ret
	_ASM_EXTABLE(1b, 2b)
SYM_FUNC_END(__clear_user)

	.section .note.GNU-stack, "", @progbits
