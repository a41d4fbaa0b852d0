// SPDX-License-Identifier: GPL-2.0-or-later
// The scheduler: one round-robin queue a CPU, wake-ups, context switches, preemption.
#include "bug.h"
#include "host_abi.h"
#include "printk.h"
#include "rq.h"
#include "timer.h"
#include "tracepoint.h"

DEFINE_PER_CPU(u32, __preempt_count) = 1;
DEFINE_PER_CPU(u32, __need_resched);
DEFINE_PER_CPU(struct rq, runqueues);

static noinline void update_rq_clock(struct rq *rq)
{
	rq->clock = sched_clock();
}

static __always_inline void update_stats_wait_end(struct rq *rq, struct task_struct *p)
{
	if (p != rq->idle)
		trace_sched_stat_wait(p, rq->clock - p->wait_start);
}

static __always_inline void update_stats_enqueue(struct rq *rq, struct task_struct *p)
{
	if (p->sleep_start)
		trace_sched_stat_sleep(p, rq->clock - p->sleep_start);
	if (p->block_start)
		trace_sched_stat_blocked(p, rq->clock - p->block_start);
	p->sleep_start = p->block_start = 0;
	if (p->on_rq != TASK_ON_RQ_MIGRATING)
		p->wait_start = rq->clock;
}

static __always_inline void update_stats_dequeue(struct rq *rq, struct task_struct *p)
{
	if (p->__state & TASK_INTERRUPTIBLE)
		p->sleep_start = rq->clock;
	if (p->__state & TASK_UNINTERRUPTIBLE)
		p->block_start = rq->clock;
}

static noinline void enqueue_task(struct rq *rq, struct task_struct *p,
				  int flags __attribute__((unused)))
{
	update_rq_clock(rq);
	update_stats_enqueue(rq, p);
	list_add_tail(&p->se.group_node, &rq->queue);
	rq->nr_running++;
}

static noinline void dequeue_task(struct rq *rq, struct task_struct *p, int flags)
{
	if (flags & DEQUEUE_SLEEP)
		update_stats_dequeue(rq, p);
	list_del_init(&p->se.group_node);
	rq->nr_running--;
}

void activate_task(struct rq *rq, struct task_struct *p, int flags)
{
	enqueue_task(rq, p, flags);
	__atomic_store_n(&p->on_rq, TASK_ON_RQ_QUEUED, __ATOMIC_RELEASE);
}

void deactivate_task(struct rq *rq, struct task_struct *p, int flags)
{
	WRITE_ONCE(p->on_rq, flags & DEQUEUE_SLEEP ? 0 : TASK_ON_RQ_MIGRATING);
	dequeue_task(rq, p, flags);
}

/* The queue's lock is held. */
void resched_curr(struct rq *rq)
{
	int cpu = rq->cpu;

	if (likely(cpu == smp_processor_id())) {
		this_cpu_write(__need_resched, 1);
		return;
	}
	*per_cpu_ptr(&__need_resched, cpu) = 1;
	smp_send_reschedule(cpu);
}

static noinline void ttwu_do_wakeup(struct rq *rq, struct task_struct *p)
{
	resched_curr(rq);
	p->__state = TASK_RUNNING;
	trace_sched_wakeup(p);
}

static __always_inline int select_task_rq(struct task_struct *p, int prev_cpu)
{
	return nr_cpu_ids == 1 ? 0 : select_task_rq_fair(p, prev_cpu, 0);
}

/* It has not left its queue yet: it was about to sleep, and now goes on. */
static __always_inline bool ttwu_runnable(struct task_struct *p)
{
	struct rq *rq = __task_rq_lock(p);
	bool on_rq;

	on_rq = p->on_rq;
	if (on_rq)
		ttwu_do_wakeup(rq, p);
	rq_unlock(rq);
	return on_rq;
}

static __always_inline void ttwu_queue(struct task_struct *p, int cpu, int wake_flags)
{
	struct rq *rq = cpu_rq(cpu);

	if (task_cpu(p) != cpu)
		set_task_cpu(p, cpu);
	rq_lock(rq);
	activate_task(rq, p, wake_flags);
	ttwu_do_wakeup(rq, p);
	rq_unlock(rq);
}

int try_to_wake_up(struct task_struct *p, unsigned int state, int wake_flags)
{
	unsigned long flags;
	int success = 0;

	preempt_disable();
	flags = _raw_spin_lock_irqsave(&p->pi_lock);
	if (READ_ONCE(p->__state) & state) {
		trace_sched_waking(p);
		if (!READ_ONCE(p->on_rq) || !ttwu_runnable(p)) {
			/* The CPU that it goes to sleep on still uses its stack. */
			smp_cond_wait(!READ_ONCE(p->on_cpu));
			ttwu_queue(p, select_task_rq(p, task_cpu(p)), wake_flags);
		}
		success = 1;
	}
	_raw_spin_unlock_irqrestore(&p->pi_lock, flags);
	/* As with voluntary preemption: the waker goes on until it is asked, sleeps or is interrupted. */
	preempt_enable_no_resched();
	return success;
}

int wake_up_process(struct task_struct *p)
{
	return try_to_wake_up(p, TASK_NORMAL, 0);
}

int wake_up_state(struct task_struct *p, unsigned int state)
{
	return try_to_wake_up(p, state, 0);
}

int default_wake_function(wait_queue_entry_t *curr, unsigned int mode, int wake_flags,
			  void *key __attribute__((unused)))
{
	return try_to_wake_up(curr->private, mode, wake_flags);
}

void sched_fork(unsigned long clone_flags __attribute__((unused)), struct task_struct *p)
{
	p->__state = TASK_NEW;
	p->on_rq = p->on_cpu = 0;
	spin_lock_init(&p->pi_lock);
	p->time_slice = TIME_SLICE;
	p->utime = p->stime = p->nvcsw = p->nivcsw = 0;
	p->wait_start = p->sleep_start = p->block_start = 0;
	INIT_LIST_HEAD(&p->se.group_node);
}

void wake_up_new_task(struct task_struct *p)
{
	struct rq *rq;
	unsigned long flags;

	local_irq_save(flags);
	_raw_spin_lock(&p->pi_lock);
	WRITE_ONCE(p->__state, TASK_RUNNING);
	p->cpu = select_task_rq(p, smp_processor_id());
	rq = cpu_rq(p->cpu);
	rq_lock(rq);
	activate_task(rq, p, 0);
	trace_sched_wakeup_new(p);
	resched_curr(rq);
	rq_unlock(rq);
	_raw_spin_unlock(&p->pi_lock);
	local_irq_restore(flags);
}

/* Puts an adopted task on the queue without running a function that could be probed. */
noinstr void host_enqueue_task(struct task_struct *p)
{
	struct rq *rq;
	unsigned long flags;

	local_irq_save(flags);
	rq = this_rq();
	host_lock(&rq->__lock);
	p->__state = TASK_RUNNING;
	p->on_rq = TASK_ON_RQ_QUEUED;
	p->cpu = rq->cpu;
	p->cpus_mask = CPU_MASK_ALL;
	p->wait_start = host_clock.now_ns;
	list_add_tail(&p->se.group_node, &rq->queue);
	rq->nr_running++;
	this_cpu_write(__need_resched, 1);
	host_unlock(&rq->__lock);
	local_irq_restore(flags);
}

static noinline struct task_struct *pick_next_task(struct rq *rq, struct task_struct *prev)
{
	if (prev != rq->idle && prev->on_rq == TASK_ON_RQ_QUEUED)
		list_move_tail(&prev->se.group_node, &rq->queue);
	if (list_empty(&rq->queue) && (nr_cpu_ids == 1 || !newidle_balance(rq)))
		return rq->idle;
	return list_first_entry(&rq->queue, struct task_struct, se.group_node);
}

static noinline void finish_task_switch(struct task_struct *prev)
{
	struct rq *rq = this_rq();
	bool dead = prev->__state == TASK_DEAD;
	bool leaves = prev->on_rq == TASK_ON_RQ_MIGRATING;

	/* From here on it may run elsewhere. */
	__atomic_store_n(&prev->on_cpu, 0, __ATOMIC_RELEASE);
	rq_unlock(rq);
	if (unlikely(leaves))
		attach_task(prev);
	local_irq_enable();
	if (unlikely(dead)) {
		trace_sched_process_free(prev);
		put_task_struct(prev);
	}
}

void schedule_tail(struct task_struct *prev)
{
	finish_task_switch(prev);
	preempt_enable();
}

static __always_inline void context_switch(struct rq *rq, struct task_struct *prev,
					   struct task_struct *next)
{
	rq->curr = next;
	next->on_cpu = 1;
	rq->nr_switches++;
	prev = __switch_to_asm(prev, next);
	barrier();
	finish_task_switch(prev);
}

/* Called with preemption disabled once; interrupts are on when it returns. */
static void notrace __schedule(unsigned int sched_mode)
{
	struct task_struct *prev, *next;
	struct rq *rq;
	u32 prev_state;

	local_irq_disable();
	rq = this_rq();
	rq_lock(rq);
	update_rq_clock(rq);
	prev = rq->curr;
	prev_state = prev->__state;
	if (sched_mode == SM_NONE && prev_state && prev != rq->idle)
		deactivate_task(rq, prev, DEQUEUE_SLEEP);
	else if (unlikely(nr_cpu_ids > 1 && !is_cpu_allowed(prev, rq->cpu)))
		deactivate_task(rq, prev, 0);
	next = pick_next_task(rq, prev);
	this_cpu_write(__need_resched, 0);
	next->time_slice = TIME_SLICE;
	if (likely(prev != next)) {
		update_stats_wait_end(rq, next);
		prev->wait_start = rq->clock;
		if (sched_mode == SM_NONE)
			prev->nvcsw++;
		else
			prev->nivcsw++;
		trace_sched_switch(sched_mode != SM_NONE, prev, next, prev_state);
		context_switch(rq, prev, next);
		return;
	}
	rq_unlock(rq);
	local_irq_enable();
}

void schedule(void)
{
	/* Linux: warns, and breaks later. The handlers of probes run so, and are given up here. */
	BUG_ON(preempt_count());
	do {
		preempt_disable();
		__schedule(SM_NONE);
		preempt_enable_no_resched();
	} while (need_resched());
}

void schedule_idle(void)
{
	do {
		__schedule(SM_NONE);
	} while (need_resched());
}

void schedule_preempt_disabled(void)
{
	preempt_enable_no_resched();
	schedule();
	preempt_disable();
}

static noinline void preempt_schedule_common(void)
{
	do {
		preempt_disable();
		__schedule(SM_PREEMPT);
		preempt_enable_no_resched();
	} while (need_resched());
}

void notrace preempt_schedule(void)
{
	if (likely(preempt_count() || irqs_disabled()))
		return;
	preempt_schedule_common();
}
NOKPROBE_SYMBOL(preempt_schedule);

void preempt_schedule_irq(void)
{
	do {
		preempt_disable();
		local_irq_enable();
		__schedule(SM_PREEMPT);
		local_irq_disable();
		preempt_enable_no_resched();
	} while (need_resched());
}

void do_task_dead(void)
{
	current->flags |= PF_NOFREEZE; /* a zombie is in nobody's way */
	WRITE_ONCE(current->__state, TASK_DEAD);
	preempt_disable();
	__schedule(SM_NONE);
	BUG();
}

void scheduler_tick(void)
{
	struct rq *rq = this_rq();
	struct task_struct *curr = rq->curr;

	rq_lock(rq);
	update_rq_clock(rq);
	if (curr != rq->idle && --curr->time_slice <= 0 && rq->nr_running > 1)
		resched_curr(rq);
	rq_unlock(rq);
}

void do_sched_yield(void)
{
	preempt_disable();
	current->time_slice = 0;
	preempt_enable_no_resched();
	schedule();
}

void yield(void)
{
	set_current_state(TASK_RUNNING);
	do_sched_yield();
}

int __cond_resched(void)
{
	if (!need_resched() || preempt_count())
		return 0;
	preempt_schedule_common();
	return 1;
}

__init void init_idle(struct task_struct *idle, int cpu)
{
	struct rq *rq = cpu_rq(cpu);

	idle->__state = TASK_RUNNING;
	idle->cpu = cpu;
	idle->on_cpu = 1;
	rq->curr = rq->idle = idle;
}

__init void sched_init(void)
{
	struct rq *rq;
	int cpu;

	for_each_possible_cpu(cpu) {
		rq = cpu_rq(cpu);
		spin_lock_init(&rq->__lock);
		INIT_LIST_HEAD(&rq->queue);
		rq->cpu = cpu;
	}
	init_idle(&init_task, 0);
}
