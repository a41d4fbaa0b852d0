/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The first instructions: what the C code relies on is in the registers afterwards. */
#define __ASSEMBLY__
#include "linkage.h"
#include <asm/csr.h>

/* The host starts here, in supervisor mode: a0 = hart, a1 = struct boot_params *, sp = top of init_stack. */
	.section .head.text, "ax"
SYM_FUNC_START(_start)
	csrw	sie, zero
	la	gp, __per_cpu_load
	la	tp, init_task
	la	t0, handle_exception
	csrw	stvec, t0
	/* Deviates: Linux lets the kernel at user memory only while it copies. */
	li	t0, SR_SUM
	csrs	sstatus, t0
	mv	a0, a1
	call	riscv_start_kernel
	ebreak
SYM_FUNC_END(_start)

	.section .note.GNU-stack, "", @progbits
