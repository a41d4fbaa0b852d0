// SPDX-License-Identifier: GPL-2.0-or-later
// The idle loop of swapper.
#include "host_abi.h"
#include "hrtimer.h"
#include "sched.h"
#include "timer.h"

static noinline u64 idle_sleep_ns(void)
{
	unsigned long next = get_next_timer_interrupt();
	u64 precise = hrtimer_get_next_event(), ticks = U64_MAX;

	if (next != ULONG_MAX)
		ticks = time_after_eq(jiffies, next) ? 0 : (next - jiffies) * TICK_NSEC;
	return ticks < precise ? ticks : precise;
}

static noinline void do_idle(void)
{
	while (!need_resched()) {
		local_irq_disable();
		if (need_resched()) {
			local_irq_enable();
			break;
		}
		host_idle(idle_sleep_ns());
	}
	schedule_idle();
}

void cpu_startup_entry(void)
{
	for (;;)
		do_idle();
}
