// SPDX-License-Identifier: GPL-2.0-or-later
// Retpolines: where an indirect jump would go by prediction, a return does that predicts into a loop.
#include "linkage.h"

#ifdef CONFIG_RETPOLINE
	.section .text..__x86.indirect_thunk, "ax"

.macro INDIRECT_THUNK reg
	.balign 32
	.globl __x86_indirect_thunk_\reg
__x86_indirect_thunk_\reg:
	call 1f
2:	pause
	lfence
	jmp 2b
1:	mov %\reg, (%rsp)
	ret
	.type __x86_indirect_thunk_\reg, @function
	.size __x86_indirect_thunk_\reg, . - __x86_indirect_thunk_\reg
.endm

	.irp reg, rax, rbx, rcx, rdx, rsi, rdi, rbp, r8, r9, r10, r11, r12, r13, r14, r15
	INDIRECT_THUNK \reg
	.endr
#endif

	.section .note.GNU-stack, "", @progbits
