// SPDX-License-Identifier: GPL-2.0-or-later
// Counting semaphores.
#include "rwsem.h"
#include "sched.h"

void sema_init(struct semaphore *sem, int val)
{
	spin_lock_init(&sem->lock);
	sem->count = (unsigned int)val;
	init_waitqueue_head(&sem->wait);
}

/* 0 where it was taken, as in Linux. */
int down_trylock(struct semaphore *sem)
{
	unsigned long flags;
	int failed;

	spin_lock_irqsave(&sem->lock, flags);
	failed = !sem->count;
	sem->count -= !failed;
	spin_unlock_irqrestore(&sem->lock, flags);
	return failed;
}

static noinline void __down(struct semaphore *sem)
{
	wait_event_exclusive(&sem->wait, !down_trylock(sem));
}

void down(struct semaphore *sem)
{
	if (down_trylock(sem))
		__down(sem);
}

void up(struct semaphore *sem)
{
	unsigned long flags;

	spin_lock_irqsave(&sem->lock, flags);
	sem->count++;
	spin_unlock_irqrestore(&sem->lock, flags);
	wake_up(&sem->wait);
}
