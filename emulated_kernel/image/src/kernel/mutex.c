// SPDX-License-Identifier: GPL-2.0-or-later
// Mutexes: a fast path of one compare-and-exchange, a wait queue behind it.
#include "bug.h"
#include "sched.h"
#include <asm/barrier.h>

void mutex_init(struct mutex *lock)
{
	lock->owner = NULL;
	init_waitqueue_head(&lock->wait);
}

static __always_inline bool __mutex_trylock_fast(struct mutex *lock)
{
	struct task_struct *nobody = NULL;

	return __atomic_compare_exchange_n(&lock->owner, &nobody, current, false, __ATOMIC_ACQUIRE,
					   __ATOMIC_RELAXED);
}

static noinline void __mutex_lock_slowpath(struct mutex *lock)
{
	wait_event_exclusive(&lock->wait, __mutex_trylock_fast(lock));
}

void mutex_lock(struct mutex *lock)
{
	if (!__mutex_trylock_fast(lock))
		__mutex_lock_slowpath(lock);
}

int mutex_trylock(struct mutex *lock)
{
	return __mutex_trylock_fast(lock);
}

void mutex_unlock(struct mutex *lock)
{
	WARN_ON_ONCE(!lock->owner);
	__atomic_store_n(&lock->owner, NULL, __ATOMIC_RELEASE);
	/* Either this sees who waits, or he sees that it is free. */
	smp_mb();
	if (!list_empty(&lock->wait.head))
		wake_up(&lock->wait);
}

bool mutex_is_locked(struct mutex *lock)
{
	return lock->owner != NULL;
}
