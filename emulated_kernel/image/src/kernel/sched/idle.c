// SPDX-License-Identifier: GPL-2.0-or-later
// The idle loop of swapper.
#include "host_abi.h"
#include "sched.h"
#include "timer.h"

static noinline u64 idle_sleep_ns(void)
{
	unsigned long next = get_next_timer_interrupt();

	if (next == ULONG_MAX)
		return U64_MAX;
	return time_after_eq(jiffies, next) ? 0 : (next - jiffies) * TICK_NSEC;
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
