/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What assembly of this architecture shares: offsets in struct pt_regs, saving and restoring it. */
#ifndef _ASM_ASM_H
#define _ASM_ASM_H

#define SZREG 8
#define PT_EPC (0 * SZREG)
#define PT_RA (1 * SZREG)
#define PT_SP (2 * SZREG)
#define PT_GP (3 * SZREG)
#define PT_TP (4 * SZREG)
#define PT_T0 (5 * SZREG)
#define PT_A0 (10 * SZREG)
#define PT_A7 (17 * SZREG)
#define PT_STATUS (32 * SZREG)
#define PT_BADADDR (33 * SZREG)
#define PT_CAUSE (34 * SZREG)
#define PT_ORIG_A0 (35 * SZREG)
#define PT_REGS_SIZE (36 * SZREG)
/* ra and s0 to s11, rounded up: a stack is always 16-byte aligned. */
#define INACTIVE_FRAME_SIZE (14 * SZREG)

#ifdef __ASSEMBLY__
/* ra and x5 to x31; sp is at the struct. */
.macro for_general_registers insn
	\insn	ra, PT_RA(sp)
	.irp n, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31
	\insn	x\n, (\n * SZREG)(sp)
	.endr
.endm

/* All that a struct pt_regs has of general registers; changes t0. */
.macro save_registers
	addi	sp, sp, -PT_REGS_SIZE
	for_general_registers sd
	sd	gp, PT_GP(sp)
	sd	tp, PT_TP(sp)
	addi	t0, sp, PT_REGS_SIZE
	sd	t0, PT_SP(sp)
.endm
#endif

#endif
