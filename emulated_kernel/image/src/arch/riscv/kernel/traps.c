// SPDX-License-Identifier: GPL-2.0-or-later
// What comes in: exceptions and interrupts, from the cause to the handler and back, and system calls.
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
#include <asm/csr.h>
#include "syscall_entry.h"


static void do_trap_error(struct pt_regs *regs, const char *str)
{
	if (fixup_exception(regs))
		return;
	die(str, regs, 0);
}

static noinstr void do_trap_break(struct pt_regs *regs)
{
	switch (report_bug(regs->epc, regs)) {
	case BUG_TRAP_TYPE_WARN:
		regs->epc += BUG_INSN_LEN;
		return;
	default:
		die("Kernel BUG", regs, 0);
	}
}

/* What a cause that is an interrupt's means here. */
static noinstr unsigned long vector_of(unsigned long irq)
{
	switch (irq) {
	case IRQ_S_TIMER:
		return VECTOR_TIMER;
	case IRQ_S_SOFT:
		return VECTOR_WAKE;
	default:
		return irq - IRQ_PLATFORM + VECTOR_WATCHDOG;
	}
}

static noinstr void do_exception(struct pt_regs *regs)
{
	switch (regs->cause) {
	case EXC_BREAKPOINT:
		return do_trap_break(regs);
	case EXC_INST_PAGE_FAULT:
	case EXC_LOAD_PAGE_FAULT:
	case EXC_STORE_PAGE_FAULT:
		return do_page_fault(regs);
	case EXC_INST_ILLEGAL:
		return do_trap_error(regs, "Oops - illegal instruction");
	case EXC_LOAD_MISALIGNED:
		return do_trap_error(regs, "Oops - load address misaligned");
	case EXC_STORE_MISALIGNED:
		return do_trap_error(regs, "Oops - store (or AMO) address misaligned");
	default:
		return do_trap_error(regs, "Oops - unknown exception");
	}
}

__visible noinstr void do_host_interrupt(struct pt_regs *regs)
{
	host_restart_hypercall(regs);
	if (regs->cause & CAUSE_IRQ_FLAG)
		do_irq(regs, vector_of(regs->cause & ~CAUSE_IRQ_FLAG));
	else
		do_exception(regs);
	irqentry_exit(regs);
}

__visible noinstr void do_trap_ecall_u(struct pt_regs *regs)
{
	regs->epc += 4;
	do_syscall(regs, (int)regs->a7);
}
