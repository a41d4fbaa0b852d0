// SPDX-License-Identifier: GPL-2.0-or-later
// Workloads on tasks, locks, work queues, timers and memory.
#include "load.h"
#include "errno.h"
#include "freezer.h"
#include "mm.h"
#include "printk.h"
#include "rwsem.h"
#include "sched.h"
#include "string.h"
#include "timer.h"
#include "workqueue.h"

#define LOAD_THREADS 4
#define LOAD_ADDRESSES 32

/* Every second child also becomes another program. */
static noinline int load_child(void *data)
{
	unsigned long number = (unsigned long)data;

	if (number & 1)
		kernel_execve("/bin/true");
	do_exit((long)(number % 251) << 8);
}

/* n children one after the other, each waited for. */
noinline int load_fork(unsigned int n)
{
	u32 sum = 0;
	unsigned int i;
	int stat;
	pid_t pid;

	for (i = 0; i < n; i++) {
		pid = user_mode_thread(load_child, (void *)(unsigned long)i, SIGCHLD);
		if (pid < 0)
			return pid;
		if (kernel_wait4(pid, &stat, 0) != pid)
			return -ECHILD;
		sum = sum * 31 + (u32)(stat >> 8);
	}
	return load_result(sum);
}

struct counted_work {
	struct work_struct work;
	struct work_load *load;
	unsigned int number;
};

struct work_load {
	atomic_t sum;
	struct counted_work items[16];
};

static noinline void load_work_fn(struct work_struct *work)
{
	struct counted_work *item = container_of(work, struct counted_work, work);
	u8 *block = kmalloc(LOAD_BLOCK, GFP_KERNEL);

	if (!block)
		return;
	load_fill(block, item->number);
	__atomic_fetch_add(&item->load->sum.counter, (int)load_sum(0, block), __ATOMIC_SEQ_CST);
	kfree(block);
}

/* n items, on the system's queue and on one that is made for them. */
noinline int load_workqueue(unsigned int n)
{
	struct work_load *load = kzalloc(sizeof(*load), GFP_KERNEL);
	struct workqueue_struct *wq = load ? alloc_workqueue("load_wq", 0, 1) : NULL;
	struct counted_work *item;
	unsigned int i;
	int result = -ENOMEM;

	if (!wq)
		goto out;
	for (i = 0; i < ARRAY_SIZE(load->items); i++)
		INIT_WORK(&load->items[i].work, load_work_fn);
	for (i = 0; i < n; i++) {
		item = &load->items[i % ARRAY_SIZE(load->items)];
		flush_work(&item->work);
		item->load = load;
		item->number = i;
		queue_work(i & 1 ? wq : system_wq, &item->work);
	}
	for (i = 0; i < ARRAY_SIZE(load->items); i++)
		flush_work(&load->items[i].work);
	destroy_workqueue(wq);
	result = load_result((u32)atomic_read(&load->sum));
out:
	kfree(load);
	return result;
}

struct lock_load {
	struct mutex mutex;
	struct rw_semaphore rwsem;
	struct semaphore sem;
	unsigned int rounds;
	unsigned int inside, by_mutex, by_rwsem;
	bool broken;
};

/* Gives the others a chance while it holds a lock. */
static noinline void enter_mutex(struct lock_load *load)
{
	mutex_lock(&load->mutex);
	load->broken |= load->inside++ != 0;
	load->by_mutex++;
	yield();
	load->inside--;
	mutex_unlock(&load->mutex);
}

static noinline void enter_rwsem(struct lock_load *load, bool write)
{
	unsigned int before;

	if (write) {
		down_write(&load->rwsem);
		before = load->by_rwsem++;
		yield();
		load->broken |= load->by_rwsem != before + 1;
		downgrade_write(&load->rwsem);
	} else {
		down_read(&load->rwsem);
		before = load->by_rwsem;
		yield();
		load->broken |= load->by_rwsem != before;
	}
	up_read(&load->rwsem);
}

static noinline int load_locks_thread(void *data)
{
	struct lock_load *load = data;
	unsigned int i;

	for (i = 0; i < load->rounds; i++) {
		try_to_freeze();
		enter_mutex(load);
		enter_rwsem(load, i % 3 == 0);
		down(&load->sem);
		yield();
		up(&load->sem);
	}
	while (!kthread_should_stop()) {
		schedule_timeout_interruptible(1);
		try_to_freeze();
	}
	return 0;
}

/* Threads that take a mutex, a rwsem and a semaphore from one another, n rounds each. */
noinline int load_locks(unsigned int n)
{
	struct task_struct *threads[LOAD_THREADS];
	struct lock_load *load = kzalloc(sizeof(*load), GFP_KERNEL);
	unsigned int i, made;
	int result;

	if (!load)
		return -ENOMEM;
	load->rounds = n;
	mutex_init(&load->mutex);
	init_rwsem(&load->rwsem);
	sema_init(&load->sem, LOAD_THREADS / 2);
	for (made = 0; made < LOAD_THREADS; made++) {
		threads[made] = kthread_run(load_locks_thread, load, "load_locks");
		if (IS_ERR(threads[made]))
			break;
	}
	for (i = 0; i < made; i++)
		kthread_stop(threads[i]);
	result = made < LOAD_THREADS ? -ENOMEM : load_result(load->by_mutex * 31 + load->by_rwsem);
	if (load->broken)
		result = -EIO;
	kfree(load);
	return result;
}

/* n allocations, of which some stay for a while; what is in them is looked at when they go. */
noinline int load_memory(unsigned int n)
{
	u8 *held[LOAD_ADDRESSES] = { NULL };
	size_t sizes[LOAD_ADDRESSES] = { 0 }, size;
	u32 state = 1, sum = 0;
	unsigned int i, slot;

	for (i = 0; i < n + LOAD_ADDRESSES; i++) {
		state = state * 1664525 + 1013904223;
		slot = i % LOAD_ADDRESSES;
		try_to_freeze();
		if (held[slot])
			sum = crc32_le(sum, held[slot], sizes[slot]);
		kfree(held[slot]);
		held[slot] = NULL;
		if (i >= n)
			continue;
		size = 1 + (state >> 8) % 3000;
		held[slot] = kmalloc(size, GFP_KERNEL);
		if (!held[slot])
			return -ENOMEM;
		memset(held[slot], (int)(state >> 24), size);
		sizes[slot] = size;
	}
	return load_result(sum);
}

struct timer_load {
	struct delayed_work dwork;
	struct completion *done;
};

static noinline void load_delayed_fn(struct work_struct *work)
{
	struct delayed_work *dwork = container_of(work, struct delayed_work, work);

	complete(container_of(dwork, struct timer_load, dwork)->done);
}

/* n times: a delayed work of a few milliseconds, and a sleep beside it. */
noinline int load_timers(unsigned int n)
{
	struct completion done;
	struct timer_load load = { .done = &done };
	unsigned long started = jiffies;
	unsigned int i;

	init_completion(&done);
	INIT_DELAYED_WORK(&load.dwork, load_delayed_fn);
	for (i = 0; i < n; i++) {
		queue_delayed_work(system_wq, &load.dwork, msecs_to_jiffies(4 + i % 3 * 4));
		msleep(4);
		wait_for_completion(&done);
		flush_work(&load.dwork.work);
	}
	return time_after_eq(jiffies, started + n) ? load_result(n) : -EIO;
}
