/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Ways into and out of the kernel: boot, interrupts of the host, user mode, hypercalls. */
#define __ASSEMBLY__
#include "linkage.h"
#include "host_abi.h"
#include <asm/entry.h>

	.code64

/* The host starts here: rdi = struct boot_params *, rsp = top of init_stack, gs base = per-CPU area. */
	.section .head.text, "ax"
SYM_FUNC_START(startup_64)
	cld
	xorl	%ebp, %ebp
	call	x86_64_start_kernel
	ud2
SYM_FUNC_END(startup_64)

	.section .entry.text, "ax"

/*
 * The host pushed rip, rflags, error code and vector on the stack that it interrupted. A struct
 * pt_regs is built below them; C may change ip and flags in it. The way back has no iretq: flags
 * and ip are put below the interrupted stack pointer, which no code here uses (no red zone).
 */
SYM_FUNC_START(asm_host_interrupt)
	cli
	cld
	subq	$PT_REGS_SIZE, %rsp
	movq	%r15, 0(%rsp)
	movq	%r14, 8(%rsp)
	movq	%r13, 16(%rsp)
	movq	%r12, 24(%rsp)
	movq	%rbp, 32(%rsp)
	movq	%rbx, 40(%rsp)
	movq	%r11, 48(%rsp)
	movq	%r10, 56(%rsp)
	movq	%r9, 64(%rsp)
	movq	%r8, 72(%rsp)
	movq	%rax, PT_AX(%rsp)
	movq	%rcx, 88(%rsp)
	movq	%rdx, 96(%rsp)
	movq	%rsi, 104(%rsp)
	movq	%rdi, 112(%rsp)
	movq	PT_REGS_SIZE+8(%rsp), %rax
	movq	%rax, PT_ORIG_AX(%rsp)
	movq	PT_REGS_SIZE+24(%rsp), %rax
	movq	%rax, PT_IP(%rsp)
	movq	$0x10, PT_CS(%rsp)
	movq	PT_REGS_SIZE+16(%rsp), %rax
	movq	%rax, PT_FLAGS(%rsp)
	leaq	PT_REGS_SIZE+HOST_FRAME_SIZE(%rsp), %rax
	movq	%rax, PT_SP(%rsp)
	movq	$0x18, PT_SS(%rsp)
	movq	%rsp, %rdi
	call	do_host_interrupt
SYM_INNER_LABEL(host_interrupt_return)
	movq	PT_SP(%rsp), %rax
	movq	PT_IP(%rsp), %rcx
	movq	%rcx, -8(%rax)
	movq	PT_FLAGS(%rsp), %rcx
	movq	%rcx, -16(%rax)
	movq	PT_AX(%rsp), %rcx
	movq	%rcx, -24(%rax)
	movq	0(%rsp), %r15
	movq	8(%rsp), %r14
	movq	16(%rsp), %r13
	movq	24(%rsp), %r12
	movq	32(%rsp), %rbp
	movq	40(%rsp), %rbx
	movq	48(%rsp), %r11
	movq	56(%rsp), %r10
	movq	64(%rsp), %r9
	movq	72(%rsp), %r8
	movq	88(%rsp), %rcx
	movq	96(%rsp), %rdx
	movq	104(%rsp), %rsi
	movq	112(%rsp), %rdi
	leaq	-24(%rax), %rsp
	popq	%rax
	popfq
	ret
SYM_FUNC_END(asm_host_interrupt)

/*
 * User mode: the kernel stack is empty, and the host says which system call comes next.
 * rdi = result of the last one.
 */
SYM_FUNC_START(host_user_mode)
	xorl	%edi, %edi
1:	sti
	movl	$HYPERCALL_USER, %eax
SYM_INNER_LABEL(host_user_hlt)
	hlt
SYM_INNER_LABEL(host_user_resume)
	cmpq	$-1, %rax
	je	2f
	pushq	$0x2b
	movabsq	$FAKE_USER_SP, %r11
	pushq	%r11
	pushfq
	pushq	$0x33
	pushq	$FAKE_USER_IP
	pushq	%rax
	pushq	%rdi
	pushq	%rsi
	pushq	%rdx
	pushq	%rcx
	pushq	$-38
	pushq	%r8
	pushq	%r9
	pushq	%r10
	pushq	%r11
	pushq	%rbx
	pushq	%rbp
	pushq	%r12
	pushq	%r13
	pushq	%r14
	pushq	%r15
	movq	%rsp, %rdi
	movl	%eax, %esi
	call	do_syscall_64
SYM_INNER_LABEL(host_syscall_return)
	movq	PT_AX(%rsp), %rdi
	addq	$PT_REGS_SIZE, %rsp
	jmp	1b
2:	call	host_park
	xorl	%edi, %edi
	jmp	1b
SYM_FUNC_END(host_user_mode)

/* First code of a new task: rax = previous task, rbx = kernel thread's function, r12 = argument. */
SYM_FUNC_START(ret_from_fork)
	movq	%rax, %rdi
	call	schedule_tail
	testq	%rbx, %rbx
	jz	1f
	movq	%r12, %rdi
	call	*%rbx
1:	addq	$PT_REGS_SIZE, %rsp
	jmp	host_user_mode
SYM_FUNC_END(ret_from_fork)

/* rdi = previous task, rsi = next task; struct thread_struct is first in both. */
SYM_FUNC_START(__switch_to_asm)
	pushq	%rbp
	pushq	%rbx
	pushq	%r12
	pushq	%r13
	pushq	%r14
	pushq	%r15
	movq	%rsp, (%rdi)
	movq	(%rsi), %rsp
	popq	%r15
	popq	%r14
	popq	%r13
	popq	%r12
	popq	%rbx
	popq	%rbp
	jmp	__switch_to
SYM_FUNC_END(__switch_to_asm)

/* long host_hypercall(nr, a0, a1, a2, a3) */
SYM_FUNC_START(host_hypercall)
	movq	%rdi, %rax
	movq	%rsi, %rdi
	movq	%rdx, %rsi
	movq	%rcx, %rdx
	movq	%r8, %r10
SYM_INNER_LABEL(host_hypercall_hlt)
	hlt
SYM_INNER_LABEL(host_hypercall_resume)
	ret
SYM_FUNC_END(host_hypercall)

/* void host_idle(ns): the interrupt that ends it returns behind the hlt. */
SYM_FUNC_START(host_idle)
	movl	$HYPERCALL_IDLE, %eax
	sti
SYM_INNER_LABEL(host_idle_hlt)
	hlt
SYM_INNER_LABEL(host_idle_resume)
	ret
SYM_FUNC_END(host_idle)

/* void host_yield(void): lets the other CPUs run. */
SYM_FUNC_START(host_yield)
	movl	$HYPERCALL_YIELD, %eax
SYM_INNER_LABEL(host_yield_hlt)
	hlt
	ret
SYM_FUNC_END(host_yield)

/* The host starts the other CPUs here, each with its per-CPU area and the stack of its idle task. */
SYM_FUNC_START(host_secondary_entry)
	cld
	xorl	%ebp, %ebp
	call	start_secondary
	ud2
SYM_FUNC_END(host_secondary_entry)

/* The host takes the record that the arguments tell of. */
SYM_FUNC_START(host_trace_commit)
	int3
	ret
SYM_FUNC_END(host_trace_commit)

/* Return address of a function that the host calls by itself, on a stack of its own. */
SYM_FUNC_START(host_return)
	movq	%rax, %rdi
	movl	$HYPERCALL_RETURN, %eax
	hlt
	ud2
SYM_FUNC_END(host_return)

/* void call_on_irq_stack(func, regs): rbx keeps the task's stack pointer. */
SYM_FUNC_START(call_on_irq_stack)
	pushq	%rbx
	movq	%rsp, %rbx
	movq	%rdi, %rax
	movq	%rsi, %rdi
	movq	%gs:hardirq_stack_ptr, %rsp
	movb	$1, %gs:hardirq_stack_inuse
	call	*%rax
	movb	$0, %gs:hardirq_stack_inuse
	movq	%rbx, %rsp
	popq	%rbx
	ret
SYM_FUNC_END(call_on_irq_stack)

	.section .note.GNU-stack, "", @progbits
