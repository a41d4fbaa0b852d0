/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The preemption counter: bits 0-7 preempt_disable(), 8-15 softirq, 16-19 hardirq. */
#ifndef _PREEMPT_H
#define _PREEMPT_H

#include <asm/percpu.h>

#define SOFTIRQ_OFFSET (1U << 8)
#define HARDIRQ_OFFSET (1U << 16)
#define SOFTIRQ_MASK (0xffU << 8)
#define HARDIRQ_MASK (0xfU << 16)

DECLARE_PER_CPU(u32, __preempt_count);
DECLARE_PER_CPU(u32, __need_resched);

#define preempt_count() ((int)this_cpu_read(__preempt_count))
#define preempt_count_set(n) this_cpu_write(__preempt_count, (n))
#define preempt_count_add(n) this_cpu_add_32(__preempt_count, (n))
#define preempt_count_sub(n) this_cpu_add_32(__preempt_count, -(n))
#define need_resched() (this_cpu_read(__need_resched) != 0)
#define in_hardirq() (preempt_count() & HARDIRQ_MASK)
#define in_interrupt() (preempt_count() & (HARDIRQ_MASK | SOFTIRQ_MASK))
#define in_atomic() (preempt_count() != 0)

void preempt_schedule(void);

#define preempt_disable() do { preempt_count_add(1); barrier(); } while (0)
#define preempt_enable_no_resched() do { barrier(); preempt_count_sub(1); } while (0)
#define preempt_enable() do {                                              \
	preempt_enable_no_resched();                                       \
	if (unlikely(need_resched() && !preempt_count()))                  \
		preempt_schedule();                                        \
} while (0)

#endif
