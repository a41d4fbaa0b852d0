/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Memory copies and fills that the compiler calls by name. */
#define __ASSEMBLY__
#include "linkage.h"

	.text
	.globl memcpy
	.type memcpy, @function
SYM_FUNC_START(__memcpy)
memcpy:
	movq	%rdi, %rax
	movq	%rdx, %rcx
	shrq	$3, %rcx
	andl	$7, %edx
	rep movsq
	movl	%edx, %ecx
	rep movsb
	ret
	.size memcpy, .-memcpy
SYM_FUNC_END(__memcpy)

	.globl memmove
	.type memmove, @function
SYM_FUNC_START(__memmove)
memmove:
	movq	%rdi, %rax
	movq	%rdi, %r8
	subq	%rsi, %r8
	cmpq	%rdx, %r8
	jae	1f
	/* The destination begins inside the source: backwards. */
	leaq	-1(%rsi, %rdx), %rsi
	leaq	-1(%rdi, %rdx), %rdi
	movq	%rdx, %rcx
	std
	rep movsb
	cld
	ret
1:	movq	%rdx, %rcx
	rep movsb
	ret
	.size memmove, .-memmove
SYM_FUNC_END(__memmove)

	.globl memset
	.type memset, @function
SYM_FUNC_START(__memset)
memset:
	movq	%rdi, %r9
	movzbl	%sil, %esi
	movabsq	$0x0101010101010101, %rax
	imulq	%rsi, %rax
	movq	%rdx, %rcx
	shrq	$3, %rcx
	andl	$7, %edx
	rep stosq
	movl	%edx, %ecx
	rep stosb
	movq	%r9, %rax
	ret
	.size memset, .-memset
SYM_FUNC_END(__memset)

	.section .note.GNU-stack, "", @progbits
