// SPDX-License-Identifier: GPL-2.0-or-later
// Work that kernel threads do later: the system's queue, and queues with a thread of their own.
#include "workqueue.h"
#include "errno.h"
#include "mm.h"
#include "printk.h"
#include "sched.h"
#include "tracepoint.h"

struct worker_pool {
	spinlock_t lock;
	struct list_head worklist;
	struct work_struct *current_work;
	struct task_struct *worker;
	wait_queue_head_t more_work, work_done;
};

struct workqueue_struct {
	struct worker_pool pool;
	const char *name;
};

static struct workqueue_struct system_workqueue = { .name = "events" };
struct workqueue_struct *system_wq = &system_workqueue;

static void init_worker_pool(struct worker_pool *pool)
{
	spin_lock_init(&pool->lock);
	INIT_LIST_HEAD(&pool->worklist);
	init_waitqueue_head(&pool->more_work);
	init_waitqueue_head(&pool->work_done);
	pool->current_work = NULL;
}

static noinline void process_one_work(struct work_struct *work)
{
	work_func_t func = work->func;

	trace_workqueue_execute_start(work);
	func(work);
	/* The work itself may be gone. */
	trace_workqueue_execute_end(work, func);
}

static struct work_struct *next_work(struct worker_pool *pool)
{
	struct work_struct *work = NULL;
	unsigned long flags;

	spin_lock_irqsave(&pool->lock, flags);
	if (!list_empty(&pool->worklist)) {
		work = list_first_entry(&pool->worklist, struct work_struct, entry);
		list_del_init(&work->entry);
	}
	pool->current_work = work;
	spin_unlock_irqrestore(&pool->lock, flags);
	return work;
}

static noinline int worker_thread(void *__pool)
{
	struct worker_pool *pool = __pool;
	struct work_struct *work;

	current->flags |= PF_WQ_WORKER | PF_NOFREEZE;
	while (!kthread_should_stop()) {
		wait_event_idle(&pool->more_work, !list_empty(&pool->worklist) || kthread_should_stop());
		while ((work = next_work(pool))) {
			process_one_work(work);
			pool->current_work = NULL;
			wake_up_all(&pool->work_done);
		}
	}
	return 0;
}

static noinline bool insert_work(int cpu, struct workqueue_struct *wq, struct work_struct *work)
{
	struct worker_pool *pool = &wq->pool;
	unsigned long flags;
	bool queued = false;

	spin_lock_irqsave(&pool->lock, flags);
	if (list_empty(&work->entry)) {
		trace_workqueue_queue_work(cpu, wq->name, work);
		trace_workqueue_activate_work(work);
		work->pool = pool;
		list_add_tail(&work->entry, &pool->worklist);
		queued = true;
	}
	spin_unlock_irqrestore(&pool->lock, flags);
	return queued;
}

bool queue_work_on(int cpu, struct workqueue_struct *wq,
		   struct work_struct *work)
{
	bool queued = insert_work(cpu, wq, work);

	if (queued)
		wake_up(&wq->pool.more_work);
	return queued;
}

bool queue_work(struct workqueue_struct *wq, struct work_struct *work)
{
	return queue_work_on(WORK_CPU_UNBOUND, wq, work);
}

bool schedule_work(struct work_struct *work)
{
	return queue_work(system_wq, work);
}

/* Work that is done may be gone already: whoever waits asks its pool, not it. */
static bool work_is_busy(const struct worker_pool *pool, const struct work_struct *work)
{
	return pool->current_work == work || !list_empty(&work->entry);
}

void flush_work(struct work_struct *work)
{
	struct worker_pool *pool = work->pool;

	if (pool)
		wait_event(&pool->work_done, !work_is_busy(pool, work));
}

void __flush_workqueue(struct workqueue_struct *wq)
{
	struct worker_pool *pool = &wq->pool;

	wait_event(&pool->work_done, list_empty(&pool->worklist) && !pool->current_work);
}

/* Whether it was still to be done. */
bool cancel_work_sync(struct work_struct *work)
{
	struct worker_pool *pool = work->pool;
	unsigned long flags;
	bool pending;

	if (!pool)
		return false;
	spin_lock_irqsave(&pool->lock, flags);
	pending = !list_empty(&work->entry);
	list_del_init(&work->entry);
	spin_unlock_irqrestore(&pool->lock, flags);
	flush_work(work);
	return pending;
}

void delayed_work_timer_fn(struct timer_list *t)
{
	struct delayed_work *dwork = container_of(t, struct delayed_work, timer);

	queue_work(dwork->wq, &dwork->work);
}

bool queue_delayed_work(struct workqueue_struct *wq, struct delayed_work *dwork, unsigned long delay)
{
	if (!delay)
		return queue_work(wq, &dwork->work);
	if (timer_pending(&dwork->timer) || !list_empty(&dwork->work.entry))
		return false;
	dwork->wq = wq;
	mod_timer(&dwork->timer, jiffies + delay);
	return true;
}

bool cancel_delayed_work_sync(struct delayed_work *dwork)
{
	bool pending = del_timer_sync(&dwork->timer);

	return cancel_work_sync(&dwork->work) || pending;
}

static noinline int create_worker(struct worker_pool *pool, const char *name)
{
	pool->worker = kthread_run(worker_thread, pool, name);
	return PTR_ERR_OR_ZERO(pool->worker);
}

struct workqueue_struct *alloc_workqueue(const char *name, unsigned int flags __attribute__((unused)),
					 int max_active __attribute__((unused)))
{
	struct workqueue_struct *wq = kzalloc(sizeof(*wq), GFP_KERNEL);

	if (!wq)
		return NULL;
	wq->name = name;
	init_worker_pool(&wq->pool);
	if (!create_worker(&wq->pool, name))
		return wq;
	kfree(wq);
	return NULL;
}

void destroy_workqueue(struct workqueue_struct *wq)
{
	__flush_workqueue(wq);
	kthread_stop(wq->pool.worker);
	kfree(wq);
}

__init void workqueue_init(void)
{
	int error;

	init_worker_pool(&system_workqueue.pool);
	error = create_worker(&system_workqueue.pool, "kworker/0:0");
	if (error)
		pr_err("workqueue: no worker: %d\n", error);
}
