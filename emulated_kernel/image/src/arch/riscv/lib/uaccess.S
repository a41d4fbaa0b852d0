/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Copies that survive a fault and say how much is left. */
#define __ASSEMBLY__
#include "linkage.h"
#include "extable.h"

	.text
/* a0 = to, a1 = from, a2 = bytes; a0 = bytes not copied. */
SYM_FUNC_START(copy_user_generic)
	or	t0, a0, a1
	andi	t0, t0, 7
	bnez	t0, 4f
	li	t1, 8
3:	bltu	a2, t1, 4f
1:	ld	t0, 0(a1)
2:	sd	t0, 0(a0)
	addi	a1, a1, 8
	addi	a0, a0, 8
	addi	a2, a2, -8
	j	3b
	/* The rest, and where a word has faulted that begins in a good page. */
4:	beqz	a2, 7f
5:	lb	t0, 0(a1)
6:	sb	t0, 0(a0)
	addi	a1, a1, 1
	addi	a0, a0, 1
	addi	a2, a2, -1
	j	4b
7:	mv	a0, a2
	ret
	_ASM_EXTABLE(1b, 4b)
	_ASM_EXTABLE(2b, 4b)
	_ASM_EXTABLE(5b, 7b)
	_ASM_EXTABLE(6b, 7b)
SYM_FUNC_END(copy_user_generic)

/* a0 = to, a1 = bytes; a0 = bytes not cleared. */
SYM_FUNC_START(__clear_user)
	beqz	a1, 2f
1:	sb	zero, 0(a0)
	addi	a0, a0, 1
	addi	a1, a1, -1
	bnez	a1, 1b
2:	mv	a0, a1
	ret
	_ASM_EXTABLE(1b, 2b)
SYM_FUNC_END(__clear_user)

	.section .note.GNU-stack, "", @progbits
