/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Wait queues, completions and mutexes. */
#ifndef _WAIT_H
#define _WAIT_H

#include "list.h"
#include "spinlock.h"

struct task_struct;

typedef struct wait_queue_head {
	spinlock_t lock;
	struct list_head head;
} wait_queue_head_t;

struct wait_queue_entry;
typedef int (*wait_queue_func_t)(struct wait_queue_entry *wq_entry, unsigned int mode, int flags,
				 void *key);

typedef struct wait_queue_entry {
	struct task_struct *private;
	wait_queue_func_t func;
	struct list_head entry;
} wait_queue_entry_t;

#define DECLARE_WAIT_QUEUE_HEAD(name) \
	wait_queue_head_t name = { { 0 }, LIST_HEAD_INIT((name).head) }

static __always_inline void init_waitqueue_head(wait_queue_head_t *wq)
{
	spin_lock_init(&wq->lock);
	INIT_LIST_HEAD(&wq->head);
}

void init_wait_entry(wait_queue_entry_t *entry, int flags);
void prepare_to_wait(wait_queue_head_t *wq, wait_queue_entry_t *entry, int state);
void finish_wait(wait_queue_head_t *wq, wait_queue_entry_t *entry);
int autoremove_wake_function(wait_queue_entry_t *entry, unsigned int mode, int sync, void *key);
int __wake_up(wait_queue_head_t *wq, unsigned int mode, int nr_exclusive, void *key);
#define wake_up(wq) __wake_up(wq, TASK_NORMAL, 1, NULL)
#define wake_up_all(wq) __wake_up(wq, TASK_NORMAL, 0, NULL)

#define __wait_event(wq, condition, state) do {                            \
	wait_queue_entry_t _entry;                                         \
	init_wait_entry(&_entry, 0);                                       \
	for (;;) {                                                         \
		prepare_to_wait(wq, &_entry, state);                       \
		if (condition)                                             \
			break;                                             \
		schedule();                                                \
	}                                                                  \
	finish_wait(wq, &_entry);                                          \
} while (0)
#define wait_event(wq, condition) __wait_event(wq, condition, TASK_UNINTERRUPTIBLE)
#define wait_event_idle(wq, condition) __wait_event(wq, condition, TASK_IDLE)

struct completion {
	unsigned int done;
	wait_queue_head_t wait;
};

static __always_inline void init_completion(struct completion *x)
{
	x->done = 0;
	init_waitqueue_head(&x->wait);
}

void wait_for_completion(struct completion *x);
void complete(struct completion *x);
void complete_all(struct completion *x);
bool try_wait_for_completion(struct completion *x);

struct mutex {
	struct task_struct *owner;
	wait_queue_head_t wait;
};

#define __MUTEX_INITIALIZER(name) { NULL, { { 0 }, LIST_HEAD_INIT((name).wait.head) } }
#define DEFINE_MUTEX(name) struct mutex name = __MUTEX_INITIALIZER(name)
void mutex_init(struct mutex *lock);
void mutex_lock(struct mutex *lock);
int mutex_trylock(struct mutex *lock);
void mutex_unlock(struct mutex *lock);
bool mutex_is_locked(struct mutex *lock);

#endif
