// SPDX-License-Identifier: GPL-2.0-or-later
// What the host delivers: exceptions and interrupts, from the vector to the handler and back.
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
#include <asm/entry.h>

DEFINE_PER_CPU(unsigned long, host_cr2);
DEFINE_PER_CPU(struct task_struct *, host_mailbox);
DEFINE_PER_CPU(char *, hardirq_stack_ptr);
DEFINE_PER_CPU(u8, hardirq_stack_inuse);

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

/* An unanswered hypercall is asked again; idling ends. */
static __always_inline void host_restart_hypercall(struct pt_regs *regs)
{
	if (regs->ip == (unsigned long)host_user_resume)
		regs->ip = (unsigned long)host_user_hlt;
	else if (regs->ip == (unsigned long)host_hypercall_resume)
		regs->ip = (unsigned long)host_hypercall_hlt;
	else if (regs->ip == (unsigned long)host_idle_hlt)
		regs->ip = (unsigned long)host_idle_resume;
	if (regs->ip == (unsigned long)host_user_hlt)
		regs->cs = __USER_CS;
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
	case VECTOR_TIMER:
		return run_sysvec_on_irqstack(sysvec_timer, regs);
	case VECTOR_WAKE:
		return run_sysvec_on_irqstack(sysvec_host_wake, regs);
	case VECTOR_WATCHDOG:
		return sysvec_watchdog(regs);
	case VECTOR_RESCHEDULE:
		return sysvec_reschedule_ipi(regs);
	case VECTOR_CALL_FUNCTION:
		return run_sysvec_on_irqstack(sysvec_call_function, regs);
	case VECTOR_SYNC_CORE:
		return sysvec_sync_core(regs);
	default:
		return die("unexpected interrupt", regs, vector);
	}
}

__visible noinstr void do_host_interrupt(struct pt_regs *regs)
{
	struct host_frame *frame = (struct host_frame *)regs;

	host_restart_hypercall(regs);
	dispatch_vector(regs, frame->vector, frame->error_code);
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
