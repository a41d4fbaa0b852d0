/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Sections that no softirq comes into on this CPU. */
#ifndef _BOTTOM_HALF_H
#define _BOTTOM_HALF_H

#include "spinlock.h"

#define SOFTIRQ_DISABLE_OFFSET (2 * SOFTIRQ_OFFSET)

void __local_bh_enable_ip(unsigned long ip, unsigned int cnt);

static __always_inline void local_bh_disable(void)
{
	preempt_count_add(SOFTIRQ_DISABLE_OFFSET);
	barrier();
}

#define local_bh_enable() \
	__local_bh_enable_ip((unsigned long)__builtin_return_address(0), SOFTIRQ_DISABLE_OFFSET)
#define spin_lock_bh(lock) do { local_bh_disable(); spin_lock(lock); } while (0)
#define spin_unlock_bh(lock) do { spin_unlock(lock); local_bh_enable(); } while (0)

#endif
