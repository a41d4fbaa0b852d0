/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Memory copies and fills that the compiler calls by name; a0 is kept for the result. */
#define __ASSEMBLY__
#include "linkage.h"

	.text
	.globl memcpy
	.type memcpy, @function
SYM_FUNC_START(__memcpy)
memcpy:
	mv	t6, a0
	or	t0, a0, a1
	andi	t0, t0, 7
	bnez	t0, 2f
	li	t1, 8
1:	bltu	a2, t1, 2f
	ld	t0, 0(a1)
	sd	t0, 0(t6)
	addi	a1, a1, 8
	addi	t6, t6, 8
	addi	a2, a2, -8
	j	1b
2:	beqz	a2, 3f
	lb	t0, 0(a1)
	sb	t0, 0(t6)
	addi	a1, a1, 1
	addi	t6, t6, 1
	addi	a2, a2, -1
	j	2b
3:	ret
	.size memcpy, .-memcpy
SYM_FUNC_END(__memcpy)

	.globl memmove
	.type memmove, @function
SYM_FUNC_START(__memmove)
memmove:
	sub	t0, a0, a1
	bgeu	t0, a2, memcpy
	/* The destination begins inside the source: backwards. */
	add	a1, a1, a2
	add	t6, a0, a2
1:	beq	t6, a0, 2f
	addi	a1, a1, -1
	addi	t6, t6, -1
	lb	t0, 0(a1)
	sb	t0, 0(t6)
	j	1b
2:	ret
	.size memmove, .-memmove
SYM_FUNC_END(__memmove)

	.globl memset
	.type memset, @function
SYM_FUNC_START(__memset)
memset:
	mv	t6, a0
	add	t5, a0, a2
	andi	a1, a1, 0xff
	slli	t0, a1, 8
	or	a1, a1, t0
	slli	t0, a1, 16
	or	a1, a1, t0
	slli	t0, a1, 32
	or	a1, a1, t0
	/* Bytes up to a word's border, words, bytes. */
1:	beq	t6, t5, 4f
	andi	t0, t6, 7
	beqz	t0, 2f
	sb	a1, 0(t6)
	addi	t6, t6, 1
	j	1b
2:	sub	t0, t5, t6
	li	t1, 8
	bltu	t0, t1, 3f
	sd	a1, 0(t6)
	addi	t6, t6, 8
	j	2b
3:	beq	t6, t5, 4f
	sb	a1, 0(t6)
	addi	t6, t6, 1
	j	3b
4:	ret
	.size memset, .-memset
SYM_FUNC_END(__memset)

	.section .note.GNU-stack, "", @progbits
