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

/* Of those that wait exclusively a wake-up takes as many as it says; it takes all the others. */
#define WQ_FLAG_EXCLUSIVE 0x01

typedef struct wait_queue_entry {
	unsigned int flags;
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

void init_waitqueue_func_entry(wait_queue_entry_t *entry, wait_queue_func_t func);
void add_wait_queue(wait_queue_head_t *wq, wait_queue_entry_t *entry);
void remove_wait_queue(wait_queue_head_t *wq, wait_queue_entry_t *entry);
void init_wait_entry(wait_queue_entry_t *entry, int flags);
void prepare_to_wait(wait_queue_head_t *wq, wait_queue_entry_t *entry, int state);
void prepare_to_wait_exclusive(wait_queue_head_t *wq, wait_queue_entry_t *entry, int state);
void finish_wait(wait_queue_head_t *wq, wait_queue_entry_t *entry);
int autoremove_wake_function(wait_queue_entry_t *entry, unsigned int mode, int sync, void *key);
int __wake_up(wait_queue_head_t *wq, unsigned int mode, int nr_exclusive, void *key);
void __wake_up_locked(wait_queue_head_t *wq, unsigned int mode, int nr_exclusive);
#define wake_up(wq) __wake_up(wq, TASK_NORMAL, 1, NULL)
#define wake_up_interruptible(wq) __wake_up(wq, TASK_INTERRUPTIBLE, 1, NULL)
#define wake_up_interruptible_all(wq) __wake_up(wq, TASK_INTERRUPTIBLE, 0, NULL)
#define wake_up_all(wq) __wake_up(wq, TASK_NORMAL, 0, NULL)

#define __wait_event_how(wq, condition, state, prepare, sleep) do {        \
	wait_queue_entry_t _entry;                                         \
	init_wait_entry(&_entry, 0);                                       \
	for (;;) {                                                         \
		prepare(wq, &_entry, state);                               \
		if (condition)                                             \
			break;                                             \
		sleep;                                                     \
	}                                                                  \
	finish_wait(wq, &_entry);                                          \
} while (0)
#define __wait_event(wq, condition, state)                                 \
	__wait_event_how(wq, condition, state, prepare_to_wait, schedule())
#define __wait_event_freezable(wq, condition)                               \
	__wait_event_how(wq, condition, TASK_INTERRUPTIBLE, prepare_to_wait, freezable_schedule())
#define wait_event_exclusive(wq, condition)                                \
	__wait_event_how(wq, condition, TASK_UNINTERRUPTIBLE, prepare_to_wait_exclusive, schedule())
/* Jiffies that are left, at least 1 where the condition holds; 0: it doesn't. */
#define wait_event_timeout(wq, condition, timeout) ({                      \
	long _left = (timeout);                                            \
	__wait_event_how(wq, (condition) || !_left, TASK_UNINTERRUPTIBLE,  \
			 prepare_to_wait, _left = schedule_timeout(_left)); \
	(condition) ? max(_left, 1L) : 0L; })
#define wait_event(wq, condition) __wait_event(wq, condition, TASK_UNINTERRUPTIBLE)
/* Always 0: no signal ever comes. */
#define wait_event_interruptible(wq, condition) ({                          \
	if (!(condition))                                                  \
		__wait_event_freezable(wq, condition);                     \
	0; })
void freezable_schedule(void);
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
