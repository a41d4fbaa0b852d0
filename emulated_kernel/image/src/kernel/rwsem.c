// SPDX-License-Identifier: GPL-2.0-or-later
// Locks for many readers or one writer.
#include "rwsem.h"
#include "bug.h"
#include "sched.h"

void init_rwsem(struct rw_semaphore *sem)
{
	spin_lock_init(&sem->wait_lock);
	sem->count = 0;
	sem->writers = 0;
	init_waitqueue_head(&sem->wait);
}

int down_read_trylock(struct rw_semaphore *sem)
{
	int taken;

	spin_lock(&sem->wait_lock);
	taken = sem->count >= 0 && !sem->writers;
	sem->count += taken;
	spin_unlock(&sem->wait_lock);
	return taken;
}

static noinline void rwsem_down_read_slowpath(struct rw_semaphore *sem)
{
	wait_event(&sem->wait, down_read_trylock(sem));
}

void down_read(struct rw_semaphore *sem)
{
	if (!down_read_trylock(sem))
		rwsem_down_read_slowpath(sem);
}

static noinline void rwsem_wake(struct rw_semaphore *sem)
{
	wake_up_all(&sem->wait);
}

void up_read(struct rw_semaphore *sem)
{
	bool last;

	spin_lock(&sem->wait_lock);
	WARN_ON_ONCE(sem->count <= 0);
	last = !--sem->count;
	spin_unlock(&sem->wait_lock);
	if (last)
		rwsem_wake(sem);
}

int down_write_trylock(struct rw_semaphore *sem)
{
	int taken;

	spin_lock(&sem->wait_lock);
	taken = !sem->count;
	if (taken)
		sem->count = RWSEM_WRITER;
	spin_unlock(&sem->wait_lock);
	return taken;
}

static void announce_writer(struct rw_semaphore *sem, int change)
{
	spin_lock(&sem->wait_lock);
	sem->writers += change;
	spin_unlock(&sem->wait_lock);
}

static noinline void rwsem_down_write_slowpath(struct rw_semaphore *sem)
{
	announce_writer(sem, 1);
	wait_event(&sem->wait, down_write_trylock(sem));
	announce_writer(sem, -1);
}

void down_write(struct rw_semaphore *sem)
{
	if (!down_write_trylock(sem))
		rwsem_down_write_slowpath(sem);
}

static void leave_as_writer(struct rw_semaphore *sem, int count)
{
	spin_lock(&sem->wait_lock);
	WARN_ON_ONCE(sem->count != RWSEM_WRITER);
	sem->count = count;
	spin_unlock(&sem->wait_lock);
	rwsem_wake(sem);
}

void up_write(struct rw_semaphore *sem)
{
	leave_as_writer(sem, 0);
}

void downgrade_write(struct rw_semaphore *sem)
{
	leave_as_writer(sem, 1);
}
