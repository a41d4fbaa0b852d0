/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Work for later: items, queues of them, and those that a timer puts into one. */
#ifndef _WORKQUEUE_H
#define _WORKQUEUE_H

#include "list.h"
#include "timer.h"

struct worker_pool;
struct workqueue_struct;

struct work_struct {
	struct list_head entry;
	void (*func)(struct work_struct *work);
	struct worker_pool *pool; /* where it was queued last */
};
typedef void (*work_func_t)(struct work_struct *work);

struct delayed_work {
	struct work_struct work;
	struct timer_list timer;
	struct workqueue_struct *wq;
};

#define INIT_WORK(w, f) do {                                               \
	INIT_LIST_HEAD(&(w)->entry);                                       \
	(w)->func = (f);                                                   \
	(w)->pool = NULL;                                                  \
} while (0)
#define INIT_DELAYED_WORK(dw, f) do {                                      \
	INIT_WORK(&(dw)->work, f);                                         \
	timer_setup(&(dw)->timer, delayed_work_timer_fn);                  \
} while (0)
#define WORK_CPU_UNBOUND NR_CPUS

extern struct workqueue_struct *system_wq;

/* One thread serves a queue of its own; its works run in their order. */
struct workqueue_struct *alloc_workqueue(const char *name, unsigned int flags, int max_active);
void destroy_workqueue(struct workqueue_struct *wq);
bool queue_work_on(int cpu, struct workqueue_struct *wq, struct work_struct *work);
bool queue_work(struct workqueue_struct *wq, struct work_struct *work);
bool schedule_work(struct work_struct *work);
void flush_work(struct work_struct *work);
void __flush_workqueue(struct workqueue_struct *wq);
#define flush_workqueue(wq) __flush_workqueue(wq)
bool cancel_work_sync(struct work_struct *work);
void delayed_work_timer_fn(struct timer_list *t);
bool queue_delayed_work(struct workqueue_struct *wq, struct delayed_work *dwork, unsigned long delay);
bool cancel_delayed_work_sync(struct delayed_work *dwork);
void workqueue_init(void);

#endif
