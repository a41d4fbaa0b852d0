// SPDX-License-Identifier: GPL-2.0-or-later
// What the host delivers: exceptions and interrupts, from the cause to the handler and back.
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
#include <asm/entry.h>

DEFINE_PER_CPU(struct task_struct *, host_mailbox);
DEFINE_PER_CPU(char *, hardirq_stack_ptr);
DEFINE_PER_CPU(u8, hardirq_stack_inuse);

static void do_trap_error(struct pt_regs *regs, const char *str)
{
	if (fixup_exception(regs))
		return;
	die(regs, str);
}

static noinstr void do_trap_break(struct pt_regs *regs)
{
	switch (report_bug(regs->epc, regs)) {
	case BUG_TRAP_TYPE_WARN:
		regs->epc += BUG_INSN_LEN;
		return;
	default:
		die(regs, "Kernel BUG");
	}
}

/* An unanswered hypercall is asked again; idling ends. */
static __always_inline void host_restart_hypercall(struct pt_regs *regs)
{
	if (regs->epc == (unsigned long)host_user_resume)
		regs->epc = (unsigned long)host_user_hlt;
	else if (regs->epc == (unsigned long)host_hypercall_resume)
		regs->epc = (unsigned long)host_hypercall_hlt;
	else if (regs->epc == (unsigned long)host_idle_hlt)
		regs->epc = (unsigned long)host_idle_resume;
	if (regs->epc == (unsigned long)host_user_hlt)
		regs->status &= ~SR_SPP;
}

static noinstr void run_sysvec_on_irqstack(void (*func)(struct pt_regs *), struct pt_regs *regs)
{
	if (this_cpu_read(hardirq_stack_inuse))
		func(regs);
	else
		call_on_irq_stack(func, regs);
}

static noinstr void irqentry_exit_to_user_mode(void)
{
	while (need_resched()) {
		local_irq_enable();
		schedule();
		local_irq_disable();
	}
}

static noinstr void irqentry_exit(struct pt_regs *regs)
{
	if (user_mode(regs))
		irqentry_exit_to_user_mode();
	else if (!regs_irqs_disabled(regs) && !preempt_count() && need_resched())
		preempt_schedule_irq();
}

static noinstr void do_irq(struct pt_regs *regs)
{
	switch (regs->cause & ~CAUSE_IRQ_FLAG) {
	case IRQ_S_TIMER:
		return run_sysvec_on_irqstack(sysvec_timer, regs);
	case IRQ_S_SOFT:
		return run_sysvec_on_irqstack(sysvec_host_wake, regs);
	case IRQ_PLATFORM:
		return sysvec_watchdog(regs);
	case IRQ_RESCHEDULE:
		return sysvec_reschedule_ipi(regs);
	case IRQ_CALL_FUNCTION:
		return run_sysvec_on_irqstack(sysvec_call_function, regs);
	case IRQ_SYNC_CORE:
		return sysvec_sync_core(regs);
	default:
		return die(regs, "unexpected interrupt");
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
		do_irq(regs);
	else
		do_exception(regs);
	irqentry_exit(regs);
}

void sysvec_timer(struct pt_regs *regs)
{
	irq_enter();
	if (!smp_processor_id())
		do_timer(1);
	update_process_times(user_mode(regs));
	irq_exit();
}

void sysvec_host_wake(struct pt_regs *regs __attribute__((unused)))
{
	struct task_struct *task = this_cpu_read(host_mailbox);

	irq_enter();
	trace_irq_handler_entry(VECTOR_WAKE, "host");
	this_cpu_write(host_mailbox, NULL);
	if (task)
		wake_up_process(task);
	trace_irq_handler_exit(VECTOR_WAKE, task != NULL);
	irq_exit();
}

/* The way out of the interrupt does what it is for. */
void sysvec_reschedule_ipi(struct pt_regs *regs __attribute__((unused)))
{
}

void sysvec_call_function(struct pt_regs *regs __attribute__((unused)))
{
	irq_enter();
	generic_smp_call_function_interrupt();
	irq_exit();
}

void sysvec_watchdog(struct pt_regs *regs)
{
	struct task_struct *task = current;

	pr_emerg("watchdog: BUG: soft lockup - CPU#%d stuck for 1s! [%s:%d]\n",
		 smp_processor_id(), task->comm, task->pid);
	show_regs(regs);
	make_task_dead(SIGKILL);
}
