// SPDX-License-Identifier: GPL-2.0-or-later
// The freezer: sends all tasks to the refrigerator, waits until they are there, and lets them go on.
#include "freezer.h"
#include "errno.h"
#include "printk.h"
#include "smp.h"
#include "timer.h"

u32 pm_freezing;
/* Linux: 20 s. Deviates: the machine's clock jumps over what nobody uses of it. */
static u32 freeze_timeout_msecs = 1000;
static struct task_struct *freezer; /* goes on itself */

static bool freezing(struct task_struct *p)
{
	return READ_ONCE(pm_freezing) && p != freezer && !(p->flags & PF_NOFREEZE);
}

/*
 * Whoever waits for something else here looks again when it is thawed: an ordinary wake-up leads back.
 * Looks now and then without one: who should thaw it may have been killed.
 */
noinline bool refrigerator(void)
{
	if (!freezing(current))
		return false;
	current->flags |= PF_FROZEN;
	for (;;) {
		set_current_state(TASK_UNINTERRUPTIBLE);
		if (!freezing(current))
			break;
		schedule_timeout(HZ);
	}
	current->flags &= ~PF_FROZEN;
	__set_current_state(TASK_RUNNING);
	return true;
}

void freezable_schedule(void)
{
	schedule();
	try_to_freeze();
}

/* What Linux does by a signal that nobody sees: sleepers wake up, those in user mode are interrupted. */
static noinline void fake_signal_wake_up(struct task_struct *p)
{
	if (!wake_up_state(p, TASK_INTERRUPTIBLE) && READ_ONCE(p->on_cpu) && nr_cpu_ids > 1)
		smp_send_reschedule(task_cpu(p));
}

/* How many are still on their way. */
static noinline unsigned int freeze_tasks(void)
{
	struct task_struct *p;
	unsigned int todo = 0;
	unsigned long flags;

	spin_lock_irqsave(&tasklist_lock, flags);
	for_each_process(p) {
		if (!freezing(p) || READ_ONCE(p->flags) & PF_FROZEN)
			continue;
		todo++;
		fake_signal_wake_up(p);
	}
	spin_unlock_irqrestore(&tasklist_lock, flags);
	return todo;
}

/* First everybody who can runs; then time passes, for those who sleep. */
static noinline unsigned int try_to_freeze_tasks(void)
{
	unsigned long end = jiffies + msecs_to_jiffies(freeze_timeout_msecs);
	unsigned int todo;

	if (freeze_tasks())
		yield();
	while ((todo = freeze_tasks()) && !time_after_eq(jiffies, end))
		schedule_timeout_uninterruptible(1);
	return todo;
}

static noinline void show_unfrozen(unsigned int todo)
{
	struct task_struct *p;
	unsigned long flags;

	pr_err("Freezing of tasks failed after %u.%03u seconds (%u tasks refusing to freeze):\n",
	       freeze_timeout_msecs / 1000, freeze_timeout_msecs % 1000, todo);
	spin_lock_irqsave(&tasklist_lock, flags);
	for_each_process(p) {
		if (freezing(p) && !(READ_ONCE(p->flags) & PF_FROZEN))
			pr_err("task:%s pid:%d\n", p->comm, p->pid);
	}
	spin_unlock_irqrestore(&tasklist_lock, flags);
}

/* -EBUSY: not all got there, and all run again. Deviates: kernel threads freeze together with user space. */
int freeze_processes(void)
{
	unsigned int todo;

	freezer = current;
	WRITE_ONCE(pm_freezing, 1);
	todo = try_to_freeze_tasks();
	if (!todo)
		return 0;
	show_unfrozen(todo);
	thaw_processes();
	return -EBUSY;
}

void thaw_processes(void)
{
	struct task_struct *p;
	unsigned long flags;

	WRITE_ONCE(pm_freezing, 0);
	spin_lock_irqsave(&tasklist_lock, flags);
	for_each_process(p) {
		if (READ_ONCE(p->flags) & PF_FROZEN)
			wake_up_process(p);
	}
	spin_unlock_irqrestore(&tasklist_lock, flags);
	yield();
}
