/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What the files of the scheduler share. */
#ifndef _SCHED_RQ_H
#define _SCHED_RQ_H

#include "sched.h"
#include "smp.h"

/* In task_struct.on_rq; the second: taken off one queue, and not on the other one yet. */
#define TASK_ON_RQ_QUEUED 1
#define TASK_ON_RQ_MIGRATING 2
#define DEQUEUE_SLEEP 1 /* else it leaves for another CPU's queue */

/* Interrupts are off. What the lock adds to the count stays over a switch: the next task takes it off. */
static __always_inline void rq_lock(struct rq *rq)
{
	preempt_disable();
	arch_spin_lock(&rq->__lock);
}

static __always_inline bool rq_trylock(struct rq *rq)
{
	preempt_disable();
	if (arch_spin_trylock(&rq->__lock))
		return true;
	preempt_enable_no_resched();
	return false;
}

static __always_inline void rq_unlock(struct rq *rq)
{
	arch_spin_unlock(&rq->__lock);
	preempt_enable_no_resched();
}

static __always_inline bool is_cpu_allowed(const struct task_struct *p, int cpu)
{
	return p->cpus_mask & cpumask_of(cpu);
}

/* core.c: the queue's lock is held. */
void activate_task(struct rq *rq, struct task_struct *p, int flags);
void deactivate_task(struct rq *rq, struct task_struct *p, int flags);

/* migrate.c */
int select_task_rq_fair(struct task_struct *p, int prev_cpu, int wake_flags);
void set_task_cpu(struct task_struct *p, int new_cpu);
struct rq *__task_rq_lock(struct task_struct *p);
void attach_task(struct task_struct *p);
bool newidle_balance(struct rq *this_rq);

#endif
