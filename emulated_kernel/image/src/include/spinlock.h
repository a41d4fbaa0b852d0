/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Spinlocks; the plain and the raw ones are the same here. */
#ifndef _SPINLOCK_H
#define _SPINLOCK_H

#include "preempt.h"
#include <asm/irqflags.h>

typedef struct raw_spinlock {
	u32 locked;
} raw_spinlock_t;
typedef raw_spinlock_t spinlock_t;

#define DEFINE_SPINLOCK(x) spinlock_t x = { 0 }
#define spin_lock_init(lock) ((lock)->locked = 0)

void _raw_spin_lock(raw_spinlock_t *lock);
void _raw_spin_unlock(raw_spinlock_t *lock);
int _raw_spin_trylock(raw_spinlock_t *lock);
void _raw_spin_lock_irq(raw_spinlock_t *lock);
void _raw_spin_unlock_irq(raw_spinlock_t *lock);
unsigned long _raw_spin_lock_irqsave(raw_spinlock_t *lock);
void _raw_spin_unlock_irqrestore(raw_spinlock_t *lock, unsigned long flags);

/* The lock alone, where preemption is off already. */
void queued_spin_lock_slowpath(raw_spinlock_t *lock);

static __always_inline bool arch_spin_trylock(raw_spinlock_t *lock)
{
	return !__atomic_exchange_n(&lock->locked, 1, __ATOMIC_SEQ_CST);
}

static __always_inline void arch_spin_lock(raw_spinlock_t *lock)
{
	if (unlikely(!arch_spin_trylock(lock)))
		queued_spin_lock_slowpath(lock);
}

static __always_inline void arch_spin_unlock(raw_spinlock_t *lock)
{
	__atomic_store_n(&lock->locked, 0, __ATOMIC_RELEASE);
}

/* The same for code that must fire no probe; interrupts are off. */
void host_lock(raw_spinlock_t *lock);
void host_unlock(raw_spinlock_t *lock);

#define spin_lock(lock) _raw_spin_lock(lock)
#define spin_unlock(lock) _raw_spin_unlock(lock)
#define spin_trylock(lock) _raw_spin_trylock(lock)
#define spin_lock_irq(lock) _raw_spin_lock_irq(lock)
#define spin_unlock_irq(lock) _raw_spin_unlock_irq(lock)
#define spin_lock_irqsave(lock, flags) ((flags) = _raw_spin_lock_irqsave(lock))
#define spin_unlock_irqrestore(lock, flags) _raw_spin_unlock_irqrestore(lock, flags)

#endif
