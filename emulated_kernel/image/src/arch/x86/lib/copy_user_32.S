/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Copies that survive a fault and say how much is left. */
#define __ASSEMBLY__
#include "linkage.h"
#include "extable.h"

	.text
/* eax = to, edx = from, ecx = bytes; eax = bytes not copied. */
SYM_FUNC_START(copy_user_generic)
	pushl	%edi
	pushl	%esi
	movl	%eax, %edi
	movl	%edx, %esi
	movl	%ecx, %edx
	shrl	$2, %ecx
	andl	$3, %edx
1:	rep movsl
	movl	%edx, %ecx
2:	rep movsb
	xorl	%eax, %eax
	jmp	6f
3:	leal	(%edx, %ecx, 4), %ecx
	/* The word that faulted may begin in a good page: go on by bytes. */
4:	rep movsb
5:	movl	%ecx, %eax
6:	popl	%esi
	popl	%edi
	ret
	_ASM_EXTABLE(1b, 3b)
	_ASM_EXTABLE(2b, 5b)
	_ASM_EXTABLE(4b, 5b)
SYM_FUNC_END(copy_user_generic)

/* eax = to, edx = bytes; eax = bytes not cleared. */
SYM_FUNC_START(__clear_user)
	pushl	%edi
	movl	%eax, %edi
	movl	%edx, %ecx
	xorl	%eax, %eax
1:	rep stosb
2:	movl	%ecx, %eax
	popl	%edi
	ret
	_ASM_EXTABLE(1b, 2b)
SYM_FUNC_END(__clear_user)

	.section .note.GNU-stack, "", @progbits
