// SPDX-License-Identifier: GPL-2.0-or-later
// What comes in: exceptions and interrupts, from the vector to the handler and back, and system calls.
#include "bug.h"
#include "host_abi.h"
#include "kallsyms.h"
#include "printk.h"
#include "sched.h"
#include "smp.h"
#include "string.h"
#include "timer.h"
#include "tracepoint.h"
#include "uaccess.h"
#include "syscall_entry.h"

DEFINE_PER_CPU(unsigned long, host_cr2);

static void do_trap_no_fixup(const char *str, struct pt_regs *regs, long error_code)
{
	if (fixup_exception(regs))
		return;
	die(str, regs, error_code);
}

static bool handle_bug(struct pt_regs *regs)
{
	if (report_bug(regs->ip, regs) != BUG_TRAP_TYPE_WARN)
		return false;
	regs->ip += BUG_INSN_LEN;
	return true;
}

static noinstr void exc_invalid_op(struct pt_regs *regs)
{
	if (handle_bug(regs))
		return;
	do_trap_no_fixup("invalid opcode", regs, 0);
}

static noinstr void exc_divide_error(struct pt_regs *regs)
{
	do_trap_no_fixup("divide error", regs, 0);
}

static noinstr void exc_general_protection(struct pt_regs *regs, long error_code)
{
	char desc[96];

	if (fixup_exception(regs))
		return;
	if (error_code)
		snprintf(desc, sizeof(desc), "general protection fault, segment %#lx", error_code);
	else
		strcpy(desc, "general protection fault, probably for non-canonical address");
	die(desc, regs, error_code);
}

static noinstr void exc_int3(struct pt_regs *regs)
{
	die("int3", regs, 0);
}

static noinstr void exc_debug(struct pt_regs *regs)
{
	/* A single-step trap that nobody asked for: go on without stepping. */
	regs->flags &= ~X86_EFLAGS_TF;
}

static noinstr void dispatch_vector(struct pt_regs *regs, unsigned long vector, long error_code)
{
	switch (vector) {
	case VECTOR_DIVIDE_ERROR:
		return exc_divide_error(regs);
	case VECTOR_DEBUG:
		return exc_debug(regs);
	case VECTOR_BREAKPOINT:
		return exc_int3(regs);
	case VECTOR_INVALID_OPCODE:
		return exc_invalid_op(regs);
	case VECTOR_GENERAL_PROTECTION:
		return exc_general_protection(regs, error_code);
	case VECTOR_PAGE_FAULT:
		return exc_page_fault(regs, error_code);
	default:
		return do_irq(regs, vector);
	}
}

__visible noinstr void do_host_interrupt(struct pt_regs *regs)
{
	struct host_frame *frame = (struct host_frame *)regs;

	host_restart_hypercall(regs);
	dispatch_vector(regs, frame->vector, frame->error_code);
	irqentry_exit(regs);
}

#ifdef CONFIG_X86_32
__visible noinstr void do_int80_syscall_32(struct pt_regs *regs)
{
	do_syscall(regs, (int)regs->orig_ax);
}
#else
__visible noinstr void do_syscall_64(struct pt_regs *regs, int nr)
{
	do_syscall(regs, nr);
}
#endif
