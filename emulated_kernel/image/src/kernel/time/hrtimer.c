// SPDX-License-Identifier: GPL-2.0-or-later
// Timers of nanoseconds in low resolution: they expire with the first CPU's tick behind their time.
#include "freezer.h"
#include "hrtimer.h"
#include "sched.h"
#include "smp.h"
#include "tracepoint.h"

#define TIMER_SLACK_NS 50000

static LIST_HEAD(hrtimer_base);
static DEFINE_SPINLOCK(hrtimer_lock);
static struct hrtimer *running_hrtimer;

void hrtimer_init(struct hrtimer *timer, clockid_t clock_id, enum hrtimer_mode mode)
{
	INIT_LIST_HEAD(&timer->node);
	timer->expires = timer->_softexpires = 0;
	trace_hrtimer_init(timer, clock_id, mode);
}

/* The lock is held. */
static __always_inline bool remove_hrtimer(struct hrtimer *timer)
{
	if (list_empty(&timer->node))
		return false;
	trace_hrtimer_cancel(timer);
	list_del_init(&timer->node);
	return true;
}

static noinline void enqueue_hrtimer(struct hrtimer *timer, enum hrtimer_mode mode, bool was_armed)
{
	struct hrtimer *pos;

	trace_hrtimer_start(timer, mode, was_armed);
	list_for_each_entry(pos, &hrtimer_base, node) {
		if (pos->_softexpires > timer->_softexpires)
			break;
	}
	list_add_tail(&timer->node, &pos->node);
}

/* It may expire up to so many nanoseconds later than is asked for. */
void hrtimer_start_range_ns(struct hrtimer *timer, ktime_t tim, u64 delta_ns, enum hrtimer_mode mode)
{
	unsigned long flags;
	bool was_armed;

	spin_lock_irqsave(&hrtimer_lock, flags);
	was_armed = remove_hrtimer(timer);
	if (mode & HRTIMER_MODE_REL)
		tim += ktime_get();
	timer->_softexpires = tim;
	timer->expires = tim + delta_ns;
	enqueue_hrtimer(timer, mode, was_armed);
	spin_unlock_irqrestore(&hrtimer_lock, flags);
}

/* Its function isn't running any more when this returns; whether it was to. */
int hrtimer_cancel(struct hrtimer *timer)
{
	unsigned long flags;
	bool was_armed;

	spin_lock_irqsave(&hrtimer_lock, flags);
	was_armed = remove_hrtimer(timer);
	spin_unlock_irqrestore(&hrtimer_lock, flags);
	smp_cond_wait(READ_ONCE(running_hrtimer) != timer);
	return was_armed;
}

/* Nanoseconds until the first one; U64_MAX without any, and on other CPUs. */
u64 hrtimer_get_next_event(void)
{
	unsigned long flags;
	s64 left = S64_MAX;

	if (smp_processor_id())
		return U64_MAX;
	spin_lock_irqsave(&hrtimer_lock, flags);
	if (!list_empty(&hrtimer_base))
		left = list_first_entry(&hrtimer_base, struct hrtimer, node)->_softexpires - ktime_get();
	spin_unlock_irqrestore(&hrtimer_lock, flags);
	if (left == S64_MAX)
		return U64_MAX;
	return left > 0 ? left : 0;
}

static noinline void __run_hrtimer(struct hrtimer *timer, ktime_t now)
{
	remove_hrtimer(timer);
	running_hrtimer = timer;
	_raw_spin_unlock(&hrtimer_lock);
	trace_hrtimer_expire_entry(timer, now);
	timer->function(timer);
	trace_hrtimer_expire_exit(timer);
	_raw_spin_lock(&hrtimer_lock);
	running_hrtimer = NULL;
}

/* Within the tick's interrupt. */
void hrtimer_run_queues(void)
{
	struct hrtimer *timer;
	ktime_t now;

	/* Without the lock: what comes meanwhile is in time for the next tick. */
	if (smp_processor_id() || list_empty(&hrtimer_base))
		return;
	now = ktime_get();
	_raw_spin_lock(&hrtimer_lock);
	while (!list_empty(&hrtimer_base)) {
		timer = list_first_entry(&hrtimer_base, struct hrtimer, node);
		if (timer->_softexpires > now)
			break;
		__run_hrtimer(timer, now);
	}
	_raw_spin_unlock(&hrtimer_lock);
}

struct hrtimer_sleeper {
	struct hrtimer timer;
	struct task_struct *task; /* NULL: it has slept long enough */
};

static void hrtimer_wakeup(struct hrtimer *timer)
{
	struct hrtimer_sleeper *t = container_of(timer, struct hrtimer_sleeper, timer);
	struct task_struct *task = t->task;

	WRITE_ONCE(t->task, NULL);
	if (task)
		wake_up_process(task);
}

static noinline void do_nanosleep(struct hrtimer_sleeper *t, ktime_t tim, enum hrtimer_mode mode)
{
	do {
		set_current_state(TASK_INTERRUPTIBLE);
		hrtimer_start_range_ns(&t->timer, tim, TIMER_SLACK_NS, mode);
		if (READ_ONCE(t->task))
			schedule();
		hrtimer_cancel(&t->timer);
		tim = t->timer._softexpires;
		mode = HRTIMER_MODE_ABS;
	} while (READ_ONCE(t->task) && try_to_freeze());
	set_current_state(TASK_RUNNING);
}

long hrtimer_nanosleep(ktime_t rqtp, enum hrtimer_mode mode, clockid_t clockid)
{
	struct hrtimer_sleeper t = { .task = current };

	hrtimer_init(&t.timer, clockid, mode);
	t.timer.function = hrtimer_wakeup;
	do_nanosleep(&t, rqtp, mode);
	return 0;
}
