// SPDX-License-Identifier: GPL-2.0-or-later
// Completions: one task waits until another says that something is done.
#include "sched.h"

void complete(struct completion *x)
{
	x->done++;
	__wake_up(&x->wait, TASK_NORMAL, 1, NULL);
}

void complete_all(struct completion *x)
{
	x->done = UINT_MAX / 2;
	__wake_up(&x->wait, TASK_NORMAL, 0, NULL);
}

void wait_for_completion(struct completion *x)
{
	wait_event(&x->wait, x->done);
	if (x->done < UINT_MAX / 2)
		x->done--;
}

bool try_wait_for_completion(struct completion *x)
{
	if (!x->done)
		return false;
	if (x->done < UINT_MAX / 2)
		x->done--;
	return true;
}
