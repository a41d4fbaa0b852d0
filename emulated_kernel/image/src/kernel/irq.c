// SPDX-License-Identifier: GPL-2.0-or-later
// The interrupts that the host and other CPUs send.
#include "entry.h"
#include "host_abi.h"
#include "printk.h"
#include "sched.h"
#include "smp.h"
#include "timer.h"
#include "tracepoint.h"

DEFINE_PER_CPU(struct task_struct *, host_mailbox);
DEFINE_PER_CPU(char *, hardirq_stack_ptr);
DEFINE_PER_CPU(u8, hardirq_stack_inuse);

#ifdef __riscv
#define trace_irq_vector(name, vector)
#else
#define trace_irq_vector(name, vector) trace_##name(vector)
#endif

static void sysvec_timer(struct pt_regs *regs)
{
	irq_enter();
	trace_irq_vector(local_timer_entry, VECTOR_TIMER);
	if (!smp_processor_id())
		do_timer(1);
	update_process_times(user_mode(regs));
	trace_irq_vector(local_timer_exit, VECTOR_TIMER);
	irq_exit();
}

static void sysvec_host_wake(struct pt_regs *regs __attribute__((unused)))
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
static void sysvec_reschedule_ipi(struct pt_regs *regs __attribute__((unused)))
{
	trace_irq_vector(reschedule_entry, VECTOR_RESCHEDULE);
	trace_irq_vector(reschedule_exit, VECTOR_RESCHEDULE);
}

static void sysvec_call_function(struct pt_regs *regs __attribute__((unused)))
{
	irq_enter();
	trace_irq_vector(call_function_entry, VECTOR_CALL_FUNCTION);
	generic_smp_call_function_interrupt();
	trace_irq_vector(call_function_exit, VECTOR_CALL_FUNCTION);
	irq_exit();
}

static void sysvec_watchdog(struct pt_regs *regs)
{
	struct task_struct *task = current;

	pr_emerg("watchdog: BUG: soft lockup - CPU#%d stuck for 1s! [%s:%d]\n",
		 smp_processor_id(), task->comm, task->pid);
	show_regs(regs);
	make_task_dead(SIGKILL);
}

static noinstr void run_sysvec_on_irqstack(void (*func)(struct pt_regs *), struct pt_regs *regs)
{
	if (this_cpu_read(hardirq_stack_inuse))
		func(regs);
	else
		call_on_irq_stack(func, regs);
}

noinstr void do_irq(struct pt_regs *regs, unsigned long vector)
{
	switch (vector) {
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
		return die("unexpected interrupt", regs, (long)vector);
	}
}
