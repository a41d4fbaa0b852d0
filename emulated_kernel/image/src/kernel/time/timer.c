// SPDX-License-Identifier: GPL-2.0-or-later
// jiffies and the timers that count in them.
#include "hrtimer.h"
#include "sched.h"
#include "smp.h"
#include "timer.h"
#include "tracepoint.h"

u64 jiffies_64 = (unsigned long)(unsigned int)(-300 * HZ);

static LIST_HEAD(timer_base);
static DEFINE_SPINLOCK(timer_lock);
/* Whose function is being called, on the first CPU: timers expire nowhere else. */
static struct timer_list *running_timer;

void timer_setup(struct timer_list *timer, void (*func)(struct timer_list *timer))
{
	INIT_LIST_HEAD(&timer->entry);
	timer->function = func;
	timer->flags = 0;
	trace_timer_init(timer);
}

bool timer_pending(const struct timer_list *timer)
{
	return !list_empty(&timer->entry);
}

static __always_inline void detach_timer(struct timer_list *timer)
{
	list_del_init(&timer->entry);
	trace_timer_cancel(timer);
}

/* The list is in the order of expiry. */
static noinline void enqueue_timer(struct timer_list *timer)
{
	struct timer_list *pos;

	list_for_each_entry(pos, &timer_base, entry) {
		if (!time_after_eq(timer->expires, pos->expires))
			break;
	}
	list_add_tail(&timer->entry, &pos->entry);
	trace_timer_start(timer, timer->expires, timer->flags);
}

noinline int mod_timer(struct timer_list *timer, unsigned long expires)
{
	unsigned long flags;
	int pending;

	spin_lock_irqsave(&timer_lock, flags);
	pending = timer_pending(timer);
	if (pending)
		detach_timer(timer);
	timer->expires = expires;
	enqueue_timer(timer);
	spin_unlock_irqrestore(&timer_lock, flags);
	return pending;
}

void add_timer(struct timer_list *timer)
{
	mod_timer(timer, timer->expires);
}

int del_timer(struct timer_list *timer)
{
	unsigned long flags;
	int pending;

	spin_lock_irqsave(&timer_lock, flags);
	pending = timer_pending(timer);
	if (pending)
		detach_timer(timer);
	spin_unlock_irqrestore(&timer_lock, flags);
	return pending;
}

/* Its function isn't running any more either when this returns. */
int del_timer_sync(struct timer_list *timer)
{
	int pending = del_timer(timer);

	smp_cond_wait(READ_ONCE(running_timer) != timer);
	return pending;
}

unsigned long get_next_timer_interrupt(void)
{
	unsigned long flags, expires = ULONG_MAX;

	if (smp_processor_id())
		return ULONG_MAX;
	spin_lock_irqsave(&timer_lock, flags);
	if (!list_empty(&timer_base))
		expires = list_first_entry(&timer_base, struct timer_list, entry)->expires;
	spin_unlock_irqrestore(&timer_lock, flags);
	return expires;
}

static noinline void call_timer_fn(struct timer_list *timer)
{
	trace_timer_expire_entry(timer, jiffies);
	timer->function(timer);
	trace_timer_expire_exit(timer);
}

static noinline struct timer_list *expired_timer(void)
{
	struct timer_list *timer;

	if (list_empty(&timer_base))
		return NULL;
	timer = list_first_entry(&timer_base, struct timer_list, entry);
	return time_after_eq(jiffies, timer->expires) ? timer : NULL;
}

static noinline void run_timer_softirq(void)
{
	struct timer_list *timer;

	spin_lock_irq(&timer_lock);
	while ((timer = expired_timer())) {
		detach_timer(timer);
		running_timer = timer;
		spin_unlock_irq(&timer_lock);
		call_timer_fn(timer);
		spin_lock_irq(&timer_lock);
		running_timer = NULL;
	}
	spin_unlock_irq(&timer_lock);
}

void run_local_timers(void)
{
	bool expired;

	hrtimer_run_queues();
	if (smp_processor_id())
		return;
	_raw_spin_lock(&timer_lock);
	expired = expired_timer() != NULL;
	_raw_spin_unlock(&timer_lock);
	if (expired)
		raise_softirq_irqoff(TIMER_SOFTIRQ);
}

void do_timer(unsigned long ticks)
{
	jiffies_64 += ticks;
}

static noinline void account_process_tick(struct task_struct *p, int user_tick)
{
	if (user_tick)
		p->utime += TICK_NSEC;
	else
		p->stime += TICK_NSEC;
}

void update_process_times(int user_tick)
{
	account_process_tick(current, user_tick);
	run_local_timers();
	scheduler_tick();
}

struct process_timer {
	struct timer_list timer;
	struct task_struct *task;
};

static void process_timeout(struct timer_list *t)
{
	wake_up_process(container_of(t, struct process_timer, timer)->task);
}

long schedule_timeout(long timeout)
{
	struct process_timer timer = { .task = current };
	unsigned long expire;

	if (timeout == MAX_SCHEDULE_TIMEOUT) {
		schedule();
		return timeout;
	}
	expire = timeout + jiffies;
	timer_setup(&timer.timer, process_timeout);
	mod_timer(&timer.timer, expire);
	schedule();
	del_timer_sync(&timer.timer);
	timeout = expire - jiffies;
	return timeout < 0 ? 0 : timeout;
}

long schedule_timeout_interruptible(long timeout)
{
	set_current_state(TASK_INTERRUPTIBLE);
	return schedule_timeout(timeout);
}

long schedule_timeout_uninterruptible(long timeout)
{
	set_current_state(TASK_UNINTERRUPTIBLE);
	return schedule_timeout(timeout);
}

void msleep(unsigned int msecs)
{
	long timeout = msecs_to_jiffies(msecs) + 1;

	while (timeout)
		timeout = schedule_timeout_uninterruptible(timeout);
}

__init void timers_init(void)
{
	open_softirq(TIMER_SOFTIRQ, run_timer_softirq);
}
