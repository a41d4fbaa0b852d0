/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Atomic counters over the compiler's builtins, which every architecture has. */
#ifndef _ATOMIC_H
#define _ATOMIC_H

#include "types.h"

#define ATOMIC_INIT(i) { (i) }

static __always_inline int atomic_read(const atomic_t *v)
{
	return READ_ONCE(v->counter);
}

static __always_inline void atomic_set(atomic_t *v, int i)
{
	WRITE_ONCE(v->counter, i);
}

static __always_inline void atomic_inc(atomic_t *v)
{
	__atomic_fetch_add(&v->counter, 1, __ATOMIC_SEQ_CST);
}

static __always_inline void atomic_dec(atomic_t *v)
{
	__atomic_fetch_sub(&v->counter, 1, __ATOMIC_SEQ_CST);
}

static __always_inline bool atomic_dec_and_test(atomic_t *v)
{
	return __atomic_sub_fetch(&v->counter, 1, __ATOMIC_SEQ_CST) == 0;
}

static __always_inline u32 xchg_u32(u32 *p, u32 val)
{
	return __atomic_exchange_n(p, val, __ATOMIC_SEQ_CST);
}

#endif
