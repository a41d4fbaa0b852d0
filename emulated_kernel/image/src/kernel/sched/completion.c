// SPDX-License-Identifier: GPL-2.0-or-later
// Completions: one task waits until another says that something is done.
#include "sched.h"

/* All under the lock: as soon as the waiter gets it, the completion may be gone with its stack. */
static void complete_with(struct completion *x, unsigned int done, int nr_exclusive)
{
	unsigned long flags;

	spin_lock_irqsave(&x->wait.lock, flags);
	x->done = done ? done : x->done + 1;
	__wake_up_locked(&x->wait, TASK_NORMAL, nr_exclusive);
	spin_unlock_irqrestore(&x->wait.lock, flags);
}

void complete(struct completion *x)
{
	complete_with(x, 0, 1);
}

void complete_all(struct completion *x)
{
	complete_with(x, UINT_MAX / 2, 0);
}

bool try_wait_for_completion(struct completion *x)
{
	unsigned long flags;
	bool done;

	spin_lock_irqsave(&x->wait.lock, flags);
	done = x->done != 0;
	if (done && x->done < UINT_MAX / 2)
		x->done--;
	spin_unlock_irqrestore(&x->wait.lock, flags);
	return done;
}

void wait_for_completion(struct completion *x)
{
	wait_event_exclusive(&x->wait, try_wait_for_completion(x));
}
