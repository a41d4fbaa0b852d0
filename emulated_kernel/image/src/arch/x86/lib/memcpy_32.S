/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Memory copies and fills that the compiler calls by name: eax, edx, ecx as in the prototypes. */
#define __ASSEMBLY__
#include "linkage.h"

	.text
	.globl memcpy
	.type memcpy, @function
SYM_FUNC_START(__memcpy)
memcpy:
	pushl	%edi
	pushl	%esi
	movl	%eax, %edi
	movl	%edx, %esi
	movl	%ecx, %edx
	shrl	$2, %ecx
	andl	$3, %edx
	rep movsl
	movl	%edx, %ecx
	rep movsb
	popl	%esi
	popl	%edi
	ret
	.size memcpy, .-memcpy
SYM_FUNC_END(__memcpy)

	.globl memmove
	.type memmove, @function
SYM_FUNC_START(__memmove)
memmove:
	pushl	%edi
	pushl	%esi
	movl	%eax, %edi
	movl	%edx, %esi
	movl	%eax, %edx
	subl	%esi, %edx
	cmpl	%ecx, %edx
	jae	1f
	/* The destination begins inside the source: backwards. */
	leal	-1(%esi, %ecx), %esi
	leal	-1(%edi, %ecx), %edi
	std
	rep movsb
	cld
	jmp	2f
1:	rep movsb
2:	popl	%esi
	popl	%edi
	ret
	.size memmove, .-memmove
SYM_FUNC_END(__memmove)

	.globl memset
	.type memset, @function
SYM_FUNC_START(__memset)
memset:
	pushl	%edi
	pushl	%eax
	movl	%eax, %edi
	movzbl	%dl, %eax
	imull	$0x01010101, %eax, %eax
	movl	%ecx, %edx
	shrl	$2, %ecx
	andl	$3, %edx
	rep stosl
	movl	%edx, %ecx
	rep stosb
	popl	%eax
	popl	%edi
	ret
	.size memset, .-memset
SYM_FUNC_END(__memset)

	.section .note.GNU-stack, "", @progbits
