/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Ways into and out of the kernel on i386: boot, interrupts of the host, user mode, hypercalls. */
#define __ASSEMBLY__
#include "linkage.h"
#include "host_abi.h"
#include <asm/entry.h>

	.code32

/* The host starts here: eax = struct boot_params *, esp = top of init_stack, fs = the per-CPU area. */
	.section .head.text, "ax"
SYM_FUNC_START(startup_32)
	cld
	xorl	%ebp, %ebp
	call	i386_start_kernel
	ud2
SYM_FUNC_END(startup_32)

	.section .entry.text, "ax"

/*
 * The host pushed eip, eflags, error code and vector on the stack that it interrupted. A struct
 * pt_regs is built below them; C may change ip and flags in it. The way back has no iret: flags
 * and ip are put below the interrupted stack pointer, where the host's four words were.
 */
SYM_FUNC_START(asm_host_interrupt)
	cli
	cld
	subl	$PT_REGS_SIZE, %esp
	movl	%ebx, 0(%esp)
	movl	%ecx, 4(%esp)
	movl	%edx, 8(%esp)
	movl	%esi, 12(%esp)
	movl	%edi, 16(%esp)
	movl	%ebp, 20(%esp)
	movl	%eax, PT_AX(%esp)
	movl	$0x7b, 28(%esp)
	movl	$0x7b, 32(%esp)
	movl	$0xd8, 36(%esp)
	movl	$0, 40(%esp)
	movl	PT_REGS_SIZE+4(%esp), %eax
	movl	%eax, PT_ORIG_AX(%esp)
	movl	PT_REGS_SIZE+12(%esp), %eax
	movl	%eax, PT_IP(%esp)
	movl	$0x60, PT_CS(%esp)
	movl	PT_REGS_SIZE+8(%esp), %eax
	movl	%eax, PT_FLAGS(%esp)
	leal	PT_REGS_SIZE+HOST_FRAME_SIZE(%esp), %eax
	movl	%eax, PT_SP(%esp)
	movl	$0x68, PT_SS(%esp)
	movl	%esp, %eax
	call	do_host_interrupt
SYM_INNER_LABEL(host_interrupt_return)
	movl	PT_SP(%esp), %eax
	movl	PT_IP(%esp), %ecx
	movl	%ecx, -4(%eax)
	movl	PT_FLAGS(%esp), %ecx
	movl	%ecx, -8(%eax)
	movl	PT_AX(%esp), %ecx
	movl	%ecx, -12(%eax)
	movl	0(%esp), %ebx
	movl	4(%esp), %ecx
	movl	8(%esp), %edx
	movl	12(%esp), %esi
	movl	16(%esp), %edi
	movl	20(%esp), %ebp
	leal	-12(%eax), %esp
	popl	%eax
	popfl
	ret
SYM_FUNC_END(asm_host_interrupt)

/*
 * User mode: the kernel stack is empty, and the host says which system call comes next.
 * ebx = result of the last one.
 */
SYM_FUNC_START(host_user_mode)
	xorl	%ebx, %ebx
1:	sti
	movl	$HYPERCALL_USER, %eax
SYM_INNER_LABEL(host_user_hlt)
	hlt
SYM_INNER_LABEL(host_user_resume)
	cmpl	$-1, %eax
	je	2f
	pushl	$0x7b
	pushl	$FAKE_USER_SP
	pushfl
	pushl	$0x73
	pushl	$FAKE_USER_IP
	pushl	%eax
	pushl	$0
	pushl	$0
	pushl	$0x7b
	pushl	$0x7b
	pushl	$-38
	pushl	%ebp
	pushl	%edi
	pushl	%esi
	pushl	%edx
	pushl	%ecx
	pushl	%ebx
	movl	%esp, %eax
	call	do_int80_syscall_32
SYM_INNER_LABEL(host_syscall_return)
	movl	PT_AX(%esp), %ebx
	addl	$PT_REGS_SIZE, %esp
	jmp	1b
2:	movl	%ebx, %eax
	call	host_park
	xorl	%ebx, %ebx
	jmp	1b
SYM_FUNC_END(host_user_mode)

/* First code of a new task: eax = previous task, ebx = kernel thread's function, edi = argument. */
SYM_FUNC_START(ret_from_fork)
	call	schedule_tail
	testl	%ebx, %ebx
	jz	1f
	movl	%edi, %eax
	call	*%ebx
1:	addl	$PT_REGS_SIZE, %esp
	jmp	host_user_mode
SYM_FUNC_END(ret_from_fork)

/* eax = previous task, edx = next task; struct thread_struct is first in both. */
SYM_FUNC_START(__switch_to_asm)
	pushl	%ebp
	pushl	%ebx
	pushl	%edi
	pushl	%esi
	movl	%esp, (%eax)
	movl	(%edx), %esp
	popl	%esi
	popl	%edi
	popl	%ebx
	popl	%ebp
	jmp	__switch_to
SYM_FUNC_END(__switch_to_asm)

/* long host_hypercall(nr, a0, a1, a2, a3): a2 and a3 are on the stack. */
SYM_FUNC_START(host_hypercall)
	pushl	%ebx
	pushl	%esi
	movl	%edx, %ebx
	movl	12(%esp), %edx
	movl	16(%esp), %esi
SYM_INNER_LABEL(host_hypercall_hlt)
	hlt
SYM_INNER_LABEL(host_hypercall_resume)
	popl	%esi
	popl	%ebx
	ret
SYM_FUNC_END(host_hypercall)

/* void host_idle(ns in edx:eax): the interrupt that ends it returns behind the hlt. */
SYM_FUNC_START(host_idle)
	pushl	%ebx
	movl	%eax, %ebx
	movl	%edx, %ecx
	movl	$HYPERCALL_IDLE, %eax
	sti
SYM_INNER_LABEL(host_idle_hlt)
	hlt
SYM_INNER_LABEL(host_idle_resume)
	popl	%ebx
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
	movl	%eax, %ebx
	movl	$HYPERCALL_RETURN, %eax
	hlt
	ud2
SYM_FUNC_END(host_return)

/* void call_on_irq_stack(func, regs): ebx keeps the task's stack pointer. */
SYM_FUNC_START(call_on_irq_stack)
	pushl	%ebx
	movl	%esp, %ebx
	movl	%eax, %ecx
	movl	%edx, %eax
	movl	%fs:hardirq_stack_ptr, %esp
	movb	$1, %fs:hardirq_stack_inuse
	call	*%ecx
	movb	$0, %fs:hardirq_stack_inuse
	movl	%ebx, %esp
	popl	%ebx
	ret
SYM_FUNC_END(call_on_irq_stack)

	.section .note.GNU-stack, "", @progbits
