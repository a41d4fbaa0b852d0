// SPDX-License-Identifier: GPL-2.0-or-later
// How tasks end: do_exit(), and what an oops makes of a task.
#include "bug.h"
#include "errno.h"
#include "fs.h"
#include "fs_struct.h"
#include "host_abi.h"
#include "printk.h"
#include "sched.h"
#include "syscalls.h"
#include "tracepoint.h"
#include "uaccess.h"

struct rusage;

struct task_struct *child_reaper;
struct host_exits host_exits;
static DEFINE_SPINLOCK(host_exits_lock);
extern int nr_threads;

static noinline void exit_notify_host(struct task_struct *tsk, long code)
{
	struct host_exit_record *r;
	unsigned long flags;

	spin_lock_irqsave(&host_exits_lock, flags);
	r = &host_exits.ring[host_exits.count % HOST_EXIT_RING];
	r->task = (unsigned long)tsk;
	r->pid = tsk->pid;
	r->code = (s32)code;
	host_exits.count++;
	spin_unlock_irqrestore(&host_exits_lock, flags);
}

static noinline void __unhash_process(struct task_struct *p)
{
	nr_threads--;
	list_del_init(&p->tasks);
	list_del_init(&p->sibling);
	free_pid(p->thread_pid);
}

static void __release_task(struct task_struct *p)
{
	__unhash_process(p);
	p->exit_state = EXIT_DEAD;
}

/* The last reference is dropped by finish_task_switch(): the task still runs on its stack. */
void release_task(struct task_struct *p)
{
	unsigned long flags;

	spin_lock_irqsave(&tasklist_lock, flags);
	__release_task(p);
	spin_unlock_irqrestore(&tasklist_lock, flags);
}

static void reap(struct task_struct *zombie)
{
	release_task(zombie);
	put_task_struct(zombie);
}

/* Children that have ended, and nobody will ask for any more, are moved to `dead`; tasklist_lock is held. */
static noinline void forget_original_parent(struct task_struct *father, struct list_head *dead)
{
	struct task_struct *p, *n;

	list_for_each_entry_safe(p, n, &father->children, sibling) {
		if (p->exit_state == EXIT_ZOMBIE) {
			__release_task(p);
			list_add(&p->sibling, dead);
			continue;
		}
		p->exit_signal = 0;
		p->real_parent = child_reaper;
		list_move_tail(&p->sibling, &child_reaper->children);
	}
}

static noinline void mm_release(struct task_struct *tsk)
{
	if (tsk->vfork_done)
		complete(tsk->vfork_done);
	tsk->vfork_done = NULL;
}

void exit_files(struct task_struct *tsk)
{
	struct files_struct *files = tsk->files;

	if (!files)
		return;
	tsk->files = NULL;
	put_files_struct(files);
}

/* Signals have no effect here: a process of the host gets its own from there. */
static noinline void do_notify_parent(struct task_struct *tsk, int sig)
{
	trace_signal_generate(sig, CLD_EXITED, tsk->real_parent, 1, TRACE_SIGNAL_DELIVERED);
}

/*
 * Nobody waits in the guest for a process of the host: it is reaped at once, like a kernel thread. What
 * user_mode_thread() made with SIGCHLD keeps its pid and a reference until its parent has asked for it.
 */
static noinline void exit_notify(struct task_struct *tsk)
{
	struct task_struct *p, *n;
	unsigned long flags;
	LIST_HEAD(dead);

	do_notify_parent(tsk, SIGCHLD);
	spin_lock_irqsave(&tasklist_lock, flags);
	forget_original_parent(tsk, &dead);
	if (tsk->exit_signal != SIGCHLD || tsk->flags & (PF_HOST | PF_KTHREAD)) {
		__release_task(tsk);
	} else {
		get_task_struct(tsk);
		tsk->exit_state = EXIT_ZOMBIE;
		wake_up_interruptible(&tsk->real_parent->wait_chldexit);
	}
	spin_unlock_irqrestore(&tasklist_lock, flags);
	list_for_each_entry_safe(p, n, &dead, sibling) {
		list_del_init(&p->sibling);
		put_task_struct(p);
	}
}

void do_exit(long code)
{
	struct task_struct *tsk = current;

	WARN_ON(in_interrupt());
	if (unlikely(tsk == child_reaper))
		panic("Attempted to kill init! exitcode=0x%08x", (u32)code);
	tsk->flags |= PF_EXITING;
	tsk->exit_code = (int)code;
	trace_sched_process_exit(tsk);
	exit_files(tsk);
	exit_fs(tsk);
	mm_release(tsk);
	exit_notify(tsk);
	exit_notify_host(tsk, code);
	do_task_dead();
}

noinline void do_group_exit(int exit_code)
{
	do_exit(exit_code);
}

void make_task_dead(int signr)
{
	struct task_struct *tsk = current;

	if (unlikely(in_interrupt()))
		panic("Aiee, killing interrupt handler!");
	if (unlikely(!tsk->pid))
		panic("Attempted to kill the idle task!");
	if (unlikely(irqs_disabled()))
		local_irq_enable();
	if (unlikely(in_atomic())) {
		pr_info("note: %s[%d] exited with preempt_count %d\n", tsk->comm, tsk->pid,
			preempt_count());
		preempt_count_set(0);
	}
	if (unlikely(tsk->flags & PF_EXITING)) {
		pr_alert("Fixing recursive fault but reboot is needed!\n");
		set_current_state(TASK_UNINTERRUPTIBLE);
		schedule();
	}
	do_exit(signr);
}

/* An ended child that is asked for; *any: whether there is one at all, ended or not. */
static noinline struct task_struct *find_zombie(pid_t upid, bool *any)
{
	struct task_struct *p, *found = NULL;
	unsigned long flags;

	*any = false;
	spin_lock_irqsave(&tasklist_lock, flags);
	list_for_each_entry(p, &current->children, sibling) {
		if (p->exit_signal != SIGCHLD || p->flags & PF_HOST || (upid > 0 && p->pid != upid))
			continue;
		*any = true;
		if (!found && p->exit_state == EXIT_ZOMBIE)
			found = p;
	}
	spin_unlock_irqrestore(&tasklist_lock, flags);
	return found;
}

static bool wait_is_over(pid_t upid, struct task_struct **child, bool *any)
{
	*child = find_zombie(upid, any);
	return *child || !*any;
}

static noinline long do_wait(pid_t upid, int options, struct task_struct **child)
{
	bool any;

	trace_sched_process_wait(upid);
	if (!wait_is_over(upid, child, &any) && options & WNOHANG)
		return 0;
	wait_event_interruptible(&current->wait_chldexit, wait_is_over(upid, child, &any));
	return any ? (*child)->pid : -ECHILD;
}

long kernel_wait4(pid_t upid, int *stat_addr, int options)
{
	struct task_struct *child = NULL;
	long ret;

	if (options & ~WNOHANG)
		return -EINVAL;
	ret = do_wait(upid, options, &child);
	if (ret > 0) {
		*stat_addr = child->exit_code;
		reap(child);
	}
	return ret;
}

/* What it used isn't told. */
SYSCALL_DEFINE4(wait4, pid_t, upid, int __user *, stat_addr, int, options, struct rusage __user *, ru)
{
	int stat = 0;
	long ret = kernel_wait4(upid, &stat, options);

	if (ret > 0 && stat_addr && copy_to_user(stat_addr, &stat, sizeof(stat)))
		return -EFAULT;
	(void)ru;
	return ret;
}

SYSCALL_DEFINE1(exit, int, error_code)
{
	do_exit((error_code & 0xff) << 8);
}

SYSCALL_DEFINE1(exit_group, int, error_code)
{
	do_group_exit((error_code & 0xff) << 8);
}
