// SPDX-License-Identifier: GPL-2.0-or-later
// Which CPU a task runs on: where it is woken, what it may run on, and what a CPU without work takes over.
#include "rq.h"
#include "errno.h"
#include "syscalls.h"
#include "tracepoint.h"
#include "uaccess.h"

static __always_inline bool idle_cpu(int cpu)
{
	struct rq *rq = cpu_rq(cpu);

	return READ_ONCE(rq->curr) == rq->idle && !READ_ONCE(rq->nr_running);
}

static noinline int select_fallback_rq(struct task_struct *p, int prev_cpu)
{
	int cpu;

	for_each_online_cpu(cpu) {
		if (is_cpu_allowed(p, cpu))
			return cpu;
	}
	return prev_cpu;
}

/* The CPU that it ran on last, if that has nothing else to do; else one that has not. */
static noinline int select_idle_sibling(struct task_struct *p, int prev_cpu)
{
	int cpu;

	if (is_cpu_allowed(p, prev_cpu) && idle_cpu(prev_cpu))
		return prev_cpu;
	for_each_online_cpu(cpu) {
		if (is_cpu_allowed(p, cpu) && idle_cpu(cpu))
			return cpu;
	}
	return is_cpu_allowed(p, prev_cpu) ? prev_cpu : select_fallback_rq(p, prev_cpu);
}

int select_task_rq_fair(struct task_struct *p, int prev_cpu, int wake_flags __attribute__((unused)))
{
	return select_idle_sibling(p, prev_cpu);
}

/* It is on no queue, or its queue's lock is held. */
void set_task_cpu(struct task_struct *p, int new_cpu)
{
	trace_sched_migrate_task(p, new_cpu);
	WRITE_ONCE(p->cpu, new_cpu);
}

/* Interrupts are off. The queue of a task, which may change until its lock is held. */
struct rq *__task_rq_lock(struct task_struct *p)
{
	struct rq *rq;

	for (;;) {
		rq = cpu_rq(task_cpu(p));
		rq_lock(rq);
		if (likely(__atomic_load_n(&p->on_rq, __ATOMIC_ACQUIRE) != TASK_ON_RQ_MIGRATING &&
			   rq->cpu == task_cpu(p)))
			return rq;
		rq_unlock(rq);
		smp_cond_wait(READ_ONCE(p->on_rq) != TASK_ON_RQ_MIGRATING);
	}
}

/* What has left one queue comes to that of a CPU that it may run on; interrupts are off all the time. */
void attach_task(struct task_struct *p)
{
	int cpu = select_idle_sibling(p, task_cpu(p));
	struct rq *rq = cpu_rq(cpu);

	rq_lock(rq);
	if (task_cpu(p) != cpu)
		set_task_cpu(p, cpu);
	activate_task(rq, p, 0);
	resched_curr(rq);
	rq_unlock(rq);
}

/* One that waits for its turn, and may run here. Both queues' locks are held. */
static noinline struct task_struct *detach_one_task(struct rq *busiest, int this_cpu)
{
	struct task_struct *p;

	list_for_each_entry(p, &busiest->queue, se.group_node) {
		if (p != busiest->curr && !p->on_cpu && is_cpu_allowed(p, this_cpu)) {
			deactivate_task(busiest, p, 0);
			return p;
		}
	}
	return NULL;
}

/* Called with this queue's lock, so that another one's is only tried. */
static noinline bool pull_one_task(struct rq *this_rq, struct rq *busiest)
{
	struct task_struct *p;

	if (!rq_trylock(busiest))
		return false;
	p = detach_one_task(busiest, this_rq->cpu);
	if (p) {
		set_task_cpu(p, this_rq->cpu);
		activate_task(this_rq, p, 0);
	}
	rq_unlock(busiest);
	return p != NULL;
}

/* This CPU has nothing to do, and its queue's lock: it takes a task that waits on another one. */
bool newidle_balance(struct rq *this_rq)
{
	int cpu;

	for_each_online_cpu(cpu) {
		if (READ_ONCE(cpu_rq(cpu)->nr_running) > 1 && pull_one_task(this_rq, cpu_rq(cpu)))
			return true;
	}
	return false;
}

/* Deviates: a task that runs on another CPU goes at its next switch, which isn't waited for. */
static noinline int __set_cpus_allowed_ptr(struct task_struct *p, u64 new_mask)
{
	struct rq *rq;
	unsigned long flags;
	bool queued = false;
	int ret = 0;

	local_irq_save(flags);
	_raw_spin_lock(&p->pi_lock);
	rq = __task_rq_lock(p);
	if (!(new_mask & READ_ONCE(__cpu_online_mask))) {
		ret = -EINVAL;
	} else {
		p->cpus_mask = new_mask;
		queued = p->on_rq && !is_cpu_allowed(p, rq->cpu);
	}
	if (queued && rq->curr == p) {
		resched_curr(rq);
		queued = false;
	}
	if (queued)
		deactivate_task(rq, p, 0);
	rq_unlock(rq);
	if (queued)
		attach_task(p);
	_raw_spin_unlock(&p->pi_lock);
	local_irq_restore(flags);
	/* Where it is this task itself. */
	cond_resched();
	return ret;
}

int set_cpus_allowed_ptr(struct task_struct *p, u64 new_mask)
{
	return __set_cpus_allowed_ptr(p, new_mask);
}

static bool check_same_owner(const struct task_struct *p)
{
	uid_t euid = current_cred()->euid.val;

	return !euid || euid == p->cred->euid.val || euid == p->cred->uid.val;
}

long sched_setaffinity(pid_t pid, u64 in_mask)
{
	struct task_struct *p = find_get_task_by_vpid(pid ? pid : current->pid);
	int retval;

	if (!p)
		return -ESRCH;
	retval = check_same_owner(p) ? set_cpus_allowed_ptr(p, in_mask) : -EPERM;
	put_task_struct(p);
	return retval;
}

long sched_getaffinity(pid_t pid, u64 *mask)
{
	struct task_struct *p = find_get_task_by_vpid(pid ? pid : current->pid);
	unsigned long flags;

	if (!p)
		return -ESRCH;
	spin_lock_irqsave(&p->pi_lock, flags);
	*mask = p->cpus_mask & READ_ONCE(__cpu_online_mask);
	spin_unlock_irqrestore(&p->pi_lock, flags);
	put_task_struct(p);
	return 0;
}

SYSCALL_DEFINE3(sched_setaffinity, pid_t, pid, unsigned int, len, unsigned long __user *, user_mask_ptr)
{
	u64 new_mask = 0;

	if (copy_from_user(&new_mask, user_mask_ptr, min((size_t)len, sizeof(new_mask))))
		return -EFAULT;
	return sched_setaffinity(pid, new_mask);
}

/* Bytes of the mask. */
SYSCALL_DEFINE3(sched_getaffinity, pid_t, pid, unsigned int, len, unsigned long __user *, user_mask_ptr)
{
	size_t retlen = min((size_t)len, sizeof(u64));
	u64 mask;
	long ret;

	if (retlen * 8 < nr_cpu_ids || len & (sizeof(unsigned long) - 1))
		return -EINVAL;
	ret = sched_getaffinity(pid, &mask);
	if (!ret)
		ret = copy_to_user(user_mask_ptr, &mask, retlen) ? -EFAULT : (long)retlen;
	return ret;
}
