// SPDX-License-Identifier: GPL-2.0-or-later
// Wait queues: lists of tasks that sleep until a condition holds.
#include "sched.h"

void init_waitqueue_func_entry(wait_queue_entry_t *entry, wait_queue_func_t func)
{
	entry->flags = 0;
	entry->private = current;
	entry->func = func;
	INIT_LIST_HEAD(&entry->entry);
}

void add_wait_queue(wait_queue_head_t *wq, wait_queue_entry_t *entry)
{
	unsigned long flags;

	spin_lock_irqsave(&wq->lock, flags);
	list_add(&entry->entry, &wq->head);
	spin_unlock_irqrestore(&wq->lock, flags);
}

void remove_wait_queue(wait_queue_head_t *wq, wait_queue_entry_t *entry)
{
	unsigned long flags;

	spin_lock_irqsave(&wq->lock, flags);
	list_del_init(&entry->entry);
	spin_unlock_irqrestore(&wq->lock, flags);
}

void init_wait_entry(wait_queue_entry_t *entry, int flags)
{
	entry->flags = flags;
	entry->private = current;
	entry->func = autoremove_wake_function;
	INIT_LIST_HEAD(&entry->entry);
}

int autoremove_wake_function(wait_queue_entry_t *entry, unsigned int mode, int sync, void *key)
{
	int ret = default_wake_function(entry, mode, sync, key);

	if (ret)
		list_del_init(&entry->entry);
	return ret;
}

static noinline int __wake_up_common(wait_queue_head_t *wq, unsigned int mode,
				     int nr_exclusive, void *key)
{
	wait_queue_entry_t *curr, *next;
	int woken = 0;

	list_for_each_entry_safe(curr, next, &wq->head, entry) {
		if (!curr->func(curr, mode, 0, key))
			continue;
		woken++;
		if (curr->flags & WQ_FLAG_EXCLUSIVE && !--nr_exclusive)
			break;
	}
	return woken;
}

/* The queue's lock is held. */
void __wake_up_locked(wait_queue_head_t *wq, unsigned int mode, int nr_exclusive)
{
	__wake_up_common(wq, mode, nr_exclusive, NULL);
}

int __wake_up(wait_queue_head_t *wq, unsigned int mode, int nr_exclusive, void *key)
{
	unsigned long flags;
	int woken;

	spin_lock_irqsave(&wq->lock, flags);
	woken = __wake_up_common(wq, mode, nr_exclusive, key);
	spin_unlock_irqrestore(&wq->lock, flags);
	return woken;
}

void prepare_to_wait(wait_queue_head_t *wq, wait_queue_entry_t *entry, int state)
{
	unsigned long flags;

	spin_lock_irqsave(&wq->lock, flags);
	entry->flags &= ~WQ_FLAG_EXCLUSIVE;
	if (list_empty(&entry->entry))
		list_add(&entry->entry, &wq->head);
	set_current_state(state);
	spin_unlock_irqrestore(&wq->lock, flags);
}

/* Behind all others, so that a wake-up meets them first. */
void prepare_to_wait_exclusive(wait_queue_head_t *wq, wait_queue_entry_t *entry, int state)
{
	unsigned long flags;

	spin_lock_irqsave(&wq->lock, flags);
	entry->flags |= WQ_FLAG_EXCLUSIVE;
	if (list_empty(&entry->entry))
		list_add_tail(&entry->entry, &wq->head);
	set_current_state(state);
	spin_unlock_irqrestore(&wq->lock, flags);
}

void finish_wait(wait_queue_head_t *wq, wait_queue_entry_t *entry)
{
	unsigned long flags;

	__set_current_state(TASK_RUNNING);
	if (list_empty_careful(&entry->entry))
		return;
	spin_lock_irqsave(&wq->lock, flags);
	list_del_init(&entry->entry);
	spin_unlock_irqrestore(&wq->lock, flags);
}
