/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Ways into and out of the kernel: interrupts of the host, user mode, hypercalls. */
#define __ASSEMBLY__
#include "linkage.h"
#include "host_abi.h"
#include <asm/asm.h>
#include <asm/csr.h>
#include <asm/entry.h>

	.section .entry.text, "ax"

/*
 * The CPU comes here with sepc, scause, stval and sstatus telling why; C may change epc and status in the
 * struct pt_regs that is built on the interrupted stack. There is no code in user mode: what counts as
 * coming from there has SPP cleared by C, and returns to the kernel all the same. gp is the CPU's, not
 * the task's, and stays.
 */
SYM_FUNC_START(handle_exception)
	save_registers
	csrr	t0, sepc
	csrr	t1, sstatus
	csrr	t2, stval
	csrr	t3, scause
	li	t4, -1
	sd	t0, PT_EPC(sp)
	sd	t1, PT_STATUS(sp)
	sd	t2, PT_BADADDR(sp)
	sd	t3, PT_CAUSE(sp)
	sd	t4, PT_ORIG_A0(sp)
	mv	a0, sp
	call	do_host_interrupt
SYM_INNER_LABEL(ret_from_exception)
	ld	t0, PT_STATUS(sp)
	ld	t1, PT_EPC(sp)
	ori	t0, t0, SR_SPP
	csrw	sstatus, t0
	csrw	sepc, t1
	for_general_registers ld
	ld	sp, PT_SP(sp)
	sret
SYM_FUNC_END(handle_exception)

/*
 * User mode: the kernel stack is empty, and the host says which system call comes next.
 * a0 = result of the last one.
 */
SYM_FUNC_START(host_user_mode)
	li	a0, 0
1:	csrsi	sstatus, SR_SIE
	li	a7, HYPERCALL_USER
SYM_INNER_LABEL(host_user_hlt)
	wfi
SYM_INNER_LABEL(host_user_resume)
	li	t0, -1
	beq	a7, t0, 2f
	save_registers
	li	t0, FAKE_USER_IP
	li	t1, FAKE_USER_SP
	li	t2, SR_SPIE
	li	t3, EXC_SYSCALL
	sd	t0, PT_EPC(sp)
	sd	t1, PT_SP(sp)
	sd	t2, PT_STATUS(sp)
	sd	zero, PT_BADADDR(sp)
	sd	t3, PT_CAUSE(sp)
	sd	a0, PT_ORIG_A0(sp)
	mv	a0, sp
	call	do_trap_ecall_u
SYM_INNER_LABEL(host_syscall_return)
	ld	a0, PT_A0(sp)
	addi	sp, sp, PT_REGS_SIZE
	j	1b
2:	call	host_park
	li	a0, 0
	j	1b
SYM_FUNC_END(host_user_mode)

/* First code of a new task: a0 = previous task, s0 = kernel thread's function, s1 = argument. */
SYM_FUNC_START(ret_from_fork)
	call	schedule_tail
	beqz	s0, 1f
	mv	a0, s1
	jalr	s0
1:	addi	sp, sp, PT_REGS_SIZE
	j	host_user_mode
SYM_FUNC_END(ret_from_fork)

/* a0 = previous task, a1 = next task; struct thread_struct is first in both. */
SYM_FUNC_START(__switch_to_asm)
	addi	sp, sp, -INACTIVE_FRAME_SIZE
	sd	ra, 0(sp)
	sd	s0, 8(sp)
	sd	s1, 16(sp)
	.irp n, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
	sd	s\n, (8 + 8 * \n)(sp)
	.endr
	sd	sp, 0(a0)
	ld	sp, 0(a1)
	ld	ra, 0(sp)
	ld	s0, 8(sp)
	ld	s1, 16(sp)
	.irp n, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11
	ld	s\n, (8 + 8 * \n)(sp)
	.endr
	addi	sp, sp, INACTIVE_FRAME_SIZE
	tail	__switch_to
SYM_FUNC_END(__switch_to_asm)

/* long host_hypercall(nr, a0, a1, a2, a3) */
SYM_FUNC_START(host_hypercall)
	mv	a7, a0
	mv	a0, a1
	mv	a1, a2
	mv	a2, a3
	mv	a3, a4
SYM_INNER_LABEL(host_hypercall_hlt)
	wfi
SYM_INNER_LABEL(host_hypercall_resume)
	mv	a0, a7
	ret
SYM_FUNC_END(host_hypercall)

/* void host_idle(ns): the interrupt that ends it returns behind the wfi. */
SYM_FUNC_START(host_idle)
	li	a7, HYPERCALL_IDLE
	csrsi	sstatus, SR_SIE
SYM_INNER_LABEL(host_idle_hlt)
	wfi
SYM_INNER_LABEL(host_idle_resume)
	ret
SYM_FUNC_END(host_idle)

/* The host starts the other harts here: a1 = per-CPU area, sp = stack of the idle task. */
SYM_FUNC_START(host_secondary_entry)
	csrw	sie, zero
	mv	gp, a1
	ld	tp, %lo(current_task)(gp)
	la	t0, handle_exception
	csrw	stvec, t0
	li	t0, SR_SUM
	csrs	sstatus, t0
	call	start_secondary
	ebreak
SYM_FUNC_END(host_secondary_entry)

/* void host_yield(void): lets the other harts run. */
SYM_FUNC_START(host_yield)
	li	a7, HYPERCALL_YIELD
SYM_INNER_LABEL(host_yield_hlt)
	wfi
	ret
SYM_FUNC_END(host_yield)

/* Questions to the host: see asm/host_trap.h. */
SYM_FUNC_START(rethook_flush_trap)
	ebreak
	ret
SYM_FUNC_END(rethook_flush_trap)

SYM_FUNC_START(rethook_find_trap)
	ebreak
	ret
SYM_FUNC_END(rethook_find_trap)

/* The host takes the record that the arguments tell of. */
SYM_FUNC_START(host_trace_commit)
	ebreak
	ret
SYM_FUNC_END(host_trace_commit)

/* Return address of a function that the host calls by itself, on a stack of its own. */
SYM_FUNC_START(host_return)
	li	a7, HYPERCALL_RETURN
	wfi
	ebreak
SYM_FUNC_END(host_return)

/* void call_on_irq_stack(func, regs): s0 keeps the task's stack pointer. */
SYM_FUNC_START(call_on_irq_stack)
	addi	sp, sp, -16
	sd	ra, 8(sp)
	sd	s0, 0(sp)
	mv	s0, sp
	mv	t0, a0
	mv	a0, a1
	li	t1, 1
	ld	sp, %lo(hardirq_stack_ptr)(gp)
	sb	t1, %lo(hardirq_stack_inuse)(gp)
	jalr	t0
	sb	zero, %lo(hardirq_stack_inuse)(gp)
	mv	sp, s0
	ld	s0, 0(sp)
	ld	ra, 8(sp)
	addi	sp, sp, 16
	ret
SYM_FUNC_END(call_on_irq_stack)

	.section .note.GNU-stack, "", @progbits
