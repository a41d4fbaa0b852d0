// SPDX-License-Identifier: GPL-2.0-or-later
// Work that a kernel thread does later.
#include "sched.h"
#include "printk.h"

static LIST_HEAD(worklist);
static DEFINE_SPINLOCK(pool_lock);
static DECLARE_WAIT_QUEUE_HEAD(more_work);
static DECLARE_WAIT_QUEUE_HEAD(work_done);
static struct work_struct *current_work;

static noinline void process_one_work(struct work_struct *work)
{
	work->func(work);
}

static struct work_struct *next_work(void)
{
	struct work_struct *work = NULL;

	spin_lock(&pool_lock);
	if (!list_empty(&worklist)) {
		work = list_first_entry(&worklist, struct work_struct, entry);
		list_del_init(&work->entry);
	}
	current_work = work;
	spin_unlock(&pool_lock);
	return work;
}

static noinline int worker_thread(void *unused __attribute__((unused)))
{
	struct work_struct *work;

	current->flags |= PF_WQ_WORKER;
	for (;;) {
		wait_event_idle(&more_work, !list_empty(&worklist));
		while ((work = next_work()))
			process_one_work(work);
		wake_up_all(&work_done);
	}
	return 0;
}

bool queue_work_on(int cpu __attribute__((unused)), void *wq __attribute__((unused)),
		   struct work_struct *work)
{
	unsigned long flags;
	bool queued = false;

	spin_lock_irqsave(&pool_lock, flags);
	if (list_empty(&work->entry)) {
		list_add_tail(&work->entry, &worklist);
		queued = true;
	}
	spin_unlock_irqrestore(&pool_lock, flags);
	if (queued)
		wake_up(&more_work);
	return queued;
}

bool schedule_work(struct work_struct *work)
{
	return queue_work_on(0, NULL, work);
}

void flush_work(struct work_struct *work)
{
	wait_event(&work_done, list_empty(&work->entry) && current_work != work);
}

__init void workqueue_init(void)
{
	struct task_struct *worker = kthread_run(worker_thread, NULL, "kworker/0:0");

	if (IS_ERR(worker))
		pr_err("workqueue: no worker: %ld\n", PTR_ERR(worker));
}
