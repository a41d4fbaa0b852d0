// SPDX-License-Identifier: GPL-2.0-or-later
// Spinlocks: preemption off, then spin on one word.
#include "atomic.h"
#include "smp.h"
#include "spinlock.h"

int __lockfunc _raw_spin_trylock(raw_spinlock_t *lock)
{
	preempt_disable();
	if (arch_spin_trylock(lock))
		return 1;
	preempt_enable();
	return 0;
}

/* The holder runs on another CPU, or will as soon as this one lets it. */
noinline void __lockfunc queued_spin_lock_slowpath(raw_spinlock_t *lock)
{
	do
		smp_cond_wait(!READ_ONCE(lock->locked));
	while (!arch_spin_trylock(lock));
}

void __lockfunc _raw_spin_lock(raw_spinlock_t *lock)
{
	preempt_disable();
	arch_spin_lock(lock);
}

void __lockfunc _raw_spin_unlock(raw_spinlock_t *lock)
{
	arch_spin_unlock(lock);
	preempt_enable();
}

void __lockfunc _raw_spin_lock_irq(raw_spinlock_t *lock)
{
	local_irq_disable();
	_raw_spin_lock(lock);
}

void __lockfunc _raw_spin_unlock_irq(raw_spinlock_t *lock)
{
	arch_spin_unlock(lock);
	local_irq_enable();
	preempt_enable();
}

unsigned long __lockfunc _raw_spin_lock_irqsave(raw_spinlock_t *lock)
{
	unsigned long flags;

	local_irq_save(flags);
	_raw_spin_lock(lock);
	return flags;
}

void __lockfunc _raw_spin_unlock_irqrestore(raw_spinlock_t *lock, unsigned long flags)
{
	arch_spin_unlock(lock);
	local_irq_restore(flags);
	preempt_enable();
}

noinstr void host_lock(raw_spinlock_t *lock)
{
	while (!arch_spin_trylock(lock))
		smp_cond_wait(!READ_ONCE(lock->locked));
}

noinstr void host_unlock(raw_spinlock_t *lock)
{
	arch_spin_unlock(lock);
}
