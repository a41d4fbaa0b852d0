// SPDX-License-Identifier: GPL-2.0-or-later
// Soft interrupts and the borders of hard ones.
#include "bitmap.h"
#include "bottom_half.h"
#include "sched.h"
#include "timer.h"
#include "tracepoint.h"

static void (*softirq_vec[NR_SOFTIRQS])(void);
static DEFINE_PER_CPU(u32, softirq_pending);
DEFINE_PER_CPU(unsigned long, irqs_sum); /* hard interrupts since boot */

void open_softirq(int nr, void (*action)(void))
{
	softirq_vec[nr] = action;
}

void raise_softirq_irqoff(unsigned int nr)
{
	trace_softirq_raise(nr);
	this_cpu_write(softirq_pending, this_cpu_read(softirq_pending) | BIT(nr));
}

void raise_softirq(unsigned int nr)
{
	unsigned long flags;

	local_irq_save(flags);
	raise_softirq_irqoff(nr);
	local_irq_restore(flags);
}

/*
 * Deviates: nothing is left for a thread, however often a softirq raises another one; what keeps that up here is
 * traffic between two sockets, which ends when a window is full. Interrupts are off.
 */
void __do_softirq(void)
{
	u32 pending;
	int nr;

	preempt_count_add(SOFTIRQ_OFFSET);
	while ((pending = this_cpu_read(softirq_pending))) {
		this_cpu_write(softirq_pending, 0);
		local_irq_enable();
		for (nr = 0; pending; nr++, pending >>= 1) {
			if (pending & 1) {
				trace_softirq_entry(nr);
				softirq_vec[nr]();
				trace_softirq_exit(nr);
			}
		}
		local_irq_disable();
	}
	preempt_count_sub(SOFTIRQ_OFFSET);
}

static noinline void do_softirq(void)
{
	unsigned long flags;

	local_irq_save(flags);
	if (this_cpu_read(softirq_pending))
		__do_softirq();
	local_irq_restore(flags);
}

/* What was raised meanwhile runs here, in the task that held it up. */
void __local_bh_enable_ip(unsigned long ip __attribute__((unused)), unsigned int cnt)
{
	preempt_count_sub(cnt - 1);
	if (unlikely(!in_interrupt() && this_cpu_read(softirq_pending)))
		do_softirq();
	preempt_enable();
}

void irq_enter(void)
{
	preempt_count_add(HARDIRQ_OFFSET);
	this_cpu_write(irqs_sum, this_cpu_read(irqs_sum) + 1);
}

static void invoke_softirq(void)
{
	__do_softirq();
}

void irq_exit(void)
{
	preempt_count_sub(HARDIRQ_OFFSET);
	if (!in_interrupt() && this_cpu_read(softirq_pending))
		invoke_softirq();
}
