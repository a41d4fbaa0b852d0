// SPDX-License-Identifier: GPL-2.0-or-later
// How tasks end: do_exit(), and what an oops makes of a task.
#include "bug.h"
#include "fs.h"
#include "host_abi.h"
#include "printk.h"
#include "sched.h"
#include "syscalls.h"
#include "tracepoint.h"

struct task_struct *child_reaper;
struct host_exits host_exits;
extern int nr_threads;

static noinline void exit_notify_host(struct task_struct *tsk, long code)
{
	struct host_exit_record *r = &host_exits.ring[host_exits.count % HOST_EXIT_RING];

	r->task = (unsigned long)tsk;
	r->pid = tsk->pid;
	r->code = (s32)code;
	host_exits.count++;
}

static noinline void forget_original_parent(struct task_struct *father)
{
	struct task_struct *p, *n;
	unsigned long flags;

	local_irq_save(flags);
	list_for_each_entry_safe(p, n, &father->children, sibling) {
		p->real_parent = child_reaper;
		list_move_tail(&p->sibling, &child_reaper->children);
	}
	local_irq_restore(flags);
}

static noinline void __unhash_process(struct task_struct *p)
{
	nr_threads--;
	list_del_init(&p->tasks);
	list_del_init(&p->sibling);
	free_pid(p->thread_pid);
}

/* The last reference is dropped by finish_task_switch(): the task still runs on its stack. */
void release_task(struct task_struct *p)
{
	unsigned long flags;

	local_irq_save(flags);
	__unhash_process(p);
	p->exit_state = EXIT_DEAD;
	local_irq_restore(flags);
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

/* Parents don't wait here: every task is reaped at once. */
static noinline void exit_notify(struct task_struct *tsk)
{
	forget_original_parent(tsk);
	do_notify_parent(tsk, SIGCHLD);
	release_task(tsk);
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

SYSCALL_DEFINE1(exit, int, error_code)
{
	do_exit((error_code & 0xff) << 8);
}

SYSCALL_DEFINE1(exit_group, int, error_code)
{
	do_group_exit((error_code & 0xff) << 8);
}
