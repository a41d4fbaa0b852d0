// SPDX-License-Identifier: GPL-2.0-or-later
// Soft interrupts and the borders of hard ones.
#include "bitmap.h"
#include "sched.h"
#include "timer.h"

static void (*softirq_vec[NR_SOFTIRQS])(void);
static DEFINE_PER_CPU(u32, softirq_pending);

void open_softirq(int nr, void (*action)(void))
{
	softirq_vec[nr] = action;
}

void raise_softirq_irqoff(unsigned int nr)
{
	this_cpu_write(softirq_pending, this_cpu_read(softirq_pending) | BIT(nr));
}

void raise_softirq(unsigned int nr)
{
	unsigned long flags;

	local_irq_save(flags);
	raise_softirq_irqoff(nr);
	local_irq_restore(flags);
}

void __do_softirq(void)
{
	u32 pending = this_cpu_read(softirq_pending);
	int nr;

	preempt_count_add(SOFTIRQ_OFFSET);
	this_cpu_write(softirq_pending, 0);
	local_irq_enable();
	for (nr = 0; pending; nr++, pending >>= 1)
		if (pending & 1)
			softirq_vec[nr]();
	local_irq_disable();
	preempt_count_sub(SOFTIRQ_OFFSET);
}

void irq_enter(void)
{
	preempt_count_add(HARDIRQ_OFFSET);
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
