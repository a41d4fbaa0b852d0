// SPDX-License-Identifier: GPL-2.0-or-later
// Process ids: the numbers of tasks, given or wished for, and the way from number to task.
#include "errno.h"
#include "host_abi.h"
#include "sched.h"

#define PID_HASH_SIZE 256
static struct hlist_head pid_hash[PID_HASH_SIZE];
static DEFINE_SPINLOCK(pidmap_lock);
static pid_t last_pid;

static __always_inline struct hlist_head *pid_bucket(int nr)
{
	return &pid_hash[(unsigned int)nr % PID_HASH_SIZE];
}

/* A kernel thread's number doesn't stand in the way of a process of the host. */
static __always_inline struct pid *__find_pid(int nr)
{
	struct pid *pid, *kernel = NULL;

	hlist_for_each_entry(pid, pid_bucket(nr), node) {
		if (pid->nr != nr)
			continue;
		if (!pid->task || !(pid->task->flags & PF_KTHREAD))
			return pid;
		kernel = pid;
	}
	return kernel;
}

struct pid *find_vpid(int nr)
{
	return __find_pid(nr);
}

struct task_struct *pid_task(struct pid *pid, int type __attribute__((unused)))
{
	return pid ? pid->task : NULL;
}

struct task_struct *find_task_by_vpid(pid_t nr)
{
	return pid_task(find_vpid(nr), 0);
}

/* With a reference. */
struct task_struct *find_get_task_by_vpid(pid_t nr)
{
	struct task_struct *task;
	unsigned long flags;

	spin_lock_irqsave(&pidmap_lock, flags);
	task = find_task_by_vpid(nr);
	if (task)
		get_task_struct(task);
	spin_unlock_irqrestore(&pidmap_lock, flags);
	return task;
}

static bool pid_is_taken(int nr)
{
	struct pid *pid = __find_pid(nr);

	return pid && !(pid->task && pid->task->flags & PF_KTHREAD);
}

static pid_t next_free_pid(void)
{
	do {
		last_pid = last_pid >= PID_MAX - 1 ? 300 : last_pid + 1;
	} while (__find_pid(last_pid));
	return last_pid;
}

struct pid *alloc_pid(struct pid *pid, pid_t set_tid)
{
	unsigned long flags;

	if (set_tid < 0 || set_tid >= PID_MAX)
		return ERR_PTR(-EINVAL);
	spin_lock_irqsave(&pidmap_lock, flags);
	if (set_tid && pid_is_taken(set_tid)) {
		spin_unlock_irqrestore(&pidmap_lock, flags);
		return ERR_PTR(-EEXIST);
	}
	pid->nr = set_tid ? set_tid : next_free_pid();
	pid->task = NULL;
	atomic_set(&pid->count, 1);
	hlist_add_head(&pid->node, pid_bucket(pid->nr));
	spin_unlock_irqrestore(&pidmap_lock, flags);
	return pid;
}

void attach_pid(struct task_struct *task, struct pid *pid)
{
	task->thread_pid = pid;
	task->pid = task->tgid = pid->nr;
	pid->task = task;
}

void free_pid(struct pid *pid)
{
	unsigned long flags;

	spin_lock_irqsave(&pidmap_lock, flags);
	hlist_del_init(&pid->node);
	pid->task = NULL;
	spin_unlock_irqrestore(&pidmap_lock, flags);
}

/* alloc_pid() and attach_pid() for an adopted task; fires no probe. */
static __always_inline int __host_attach_pid(struct task_struct *task, pid_t nr)
{
	struct pid *pid = __find_pid(nr);

	if (pid && pid->task && pid->task->flags & PF_HOST)
		return -EEXIST;
	pid = &task->own_pid;
	pid->nr = nr;
	pid->task = task;
	atomic_set(&pid->count, 1);
	hlist_add_head(&pid->node, pid_bucket(nr));
	task->thread_pid = pid;
	task->pid = task->tgid = nr;
	return 0;
}

noinstr int host_attach_pid(struct task_struct *task, pid_t nr)
{
	unsigned long flags;
	int error;

	if (nr <= 0 || nr >= PID_MAX)
		return -EINVAL;
	local_irq_save(flags);
	host_lock(&pidmap_lock);
	error = __host_attach_pid(task, nr);
	host_unlock(&pidmap_lock);
	local_irq_restore(flags);
	return error;
}

/* find_task_by_vpid() that fires no probe. */
noinstr struct task_struct *host_find_task(pid_t nr)
{
	struct pid *pid = __find_pid(nr);

	return pid ? pid->task : NULL;
}
