// SPDX-License-Identifier: GPL-2.0-or-later
// What the host asks for beside Linux's system calls; none of it can be probed or traced.
#include "entry.h"
#include "errno.h"
#include "freezer.h"
#include "fs.h"
#include "host_abi.h"
#include "mm.h"
#include "sched.h"
#include "syscalls.h"
#include "uaccess.h"

extern int nr_threads;
int host_attach_pid(struct task_struct *task, pid_t nr);
struct task_struct *host_find_task(pid_t nr);
void host_init_thread(struct task_struct *p);

/* Called in user mode: wakes a task and sleeps until it is woken itself. */
__visible noinstr void host_park(struct task_struct *wake)
{
	set_current_state(TASK_INTERRUPTIBLE);
	if (wake)
		wake_up_process(wake);
	schedule();
	try_to_freeze();
}

static __always_inline void host_copy_comm(struct task_struct *task, const char __user *comm)
{
	int i;
	u8 c = 1;

	for (i = 0; i < TASK_COMM_LEN; i++) {
		if (c && __load_u8_nofault(&c, comm + i))
			c = 0;
		task->comm[i] = i == TASK_COMM_LEN - 1 ? 0 : (char)c;
	}
}

static __always_inline void host_set_cred(struct task_struct *task, uid_t uid, gid_t gid)
{
	task->cred = &task->own_cred;
	task->own_cred.usage.counter = 1;
	task->own_cred.uid = task->own_cred.euid = task->own_cred.fsuid = KUIDT_INIT(uid);
	task->own_cred.gid = task->own_cred.egid = task->own_cred.fsgid = KGIDT_INIT(gid);
}

static __always_inline void host_free_pages_of(struct task_struct *task)
{
	if (task->stack)
		free_pages((unsigned long)task->stack, THREAD_SIZE_ORDER);
	free_page((unsigned long)task);
}

BUILD_BUG_ON(sizeof(struct task_struct) > PAGE_SIZE);

static __always_inline struct task_struct *host_alloc_task(void)
{
	struct page *page = host_alloc_pages(0), *stack;
	struct task_struct *task;

	if (!page)
		return NULL;
	task = page_address(page);
	__builtin_memset(task, 0, sizeof(*task));
	stack = host_alloc_pages(THREAD_SIZE_ORDER);
	if (!stack) {
		host_free_pages_of(task);
		return NULL;
	}
	task->stack = page_address(stack);
	return task;
}

static __always_inline void host_link_task(struct task_struct *task, struct task_struct *parent)
{
	unsigned long flags;

	INIT_LIST_HEAD(&task->children);
	INIT_LIST_HEAD(&task->wait_chldexit.head);
	local_irq_save(flags);
	host_lock(&tasklist_lock);
	task->real_parent = parent ? parent : child_reaper;
	list_add_tail(&task->sibling, &task->real_parent->children);
	list_add_tail(&task->tasks, &init_task.tasks);
	nr_threads++;
	host_unlock(&tasklist_lock);
	local_irq_restore(flags);
}

/* Returns the task, which begins in user mode when it is scheduled, or an error. */
static noinstr long host_task_create(pid_t pid, pid_t parent, const char __user *comm, uid_t uid,
				     gid_t gid)
{
	struct task_struct *task = host_alloc_task();
	int error;

	if (!task)
		return -ENOMEM;
	task->usage.counter = 1;
	task->flags = PF_HOST;
	task->time_slice = TIME_SLICE;
	task->prio = DEFAULT_PRIO;
	task->umask = 0;
	task->start_time = host_clock.now_ns;
	host_set_cred(task, uid, gid);
	task->files = child_reaper->files;
	task->files->count.counter++;
	host_copy_comm(task, comm);
	error = host_attach_pid(task, pid);
	if (error) {
		task->files->count.counter--;
		host_free_pages_of(task);
		return error;
	}
	host_link_task(task, host_find_task(parent));
	host_init_thread(task);
	host_enqueue_task(task);
	return (long)task;
}

static noinstr long host_set_comm(pid_t pid, const char __user *comm)
{
	struct task_struct *task = pid ? host_find_task(pid) : current;

	if (!task)
		return -ESRCH;
	host_copy_comm(task, comm);
	return 0;
}

typedef long (*host_fn_t)(unsigned long, unsigned long, unsigned long, unsigned long,
			  unsigned long, unsigned long);

/* Runs any function in this task's context; args: six words in user memory. */
static noinstr long host_call(host_fn_t fn, const unsigned long __user *args)
{
	unsigned long a[6];
	int i;

	for (i = 0; i < 6; i++)
		if (__load_long_nofault(&a[i], args + i))
			return -EFAULT;
	return fn(a[0], a[1], a[2], a[3], a[4], a[5]);
}

noinstr long host_syscall(struct pt_regs *regs, int nr)
{
	switch (nr) {
	case HOST_NR_task_create:
		return host_task_create((pid_t)syscall_arg(regs, 0), (pid_t)syscall_arg(regs, 1),
					(const char *)syscall_arg(regs, 2),
					(uid_t)syscall_arg(regs, 3), (gid_t)syscall_arg(regs, 4));
	case HOST_NR_set_comm:
		return host_set_comm((pid_t)syscall_arg(regs, 0), (const char *)syscall_arg(regs, 1));
	case HOST_NR_call:
		return host_call((host_fn_t)syscall_arg(regs, 0), (const unsigned long *)syscall_arg(regs, 1));
	default:
		return -ENOSYS;
	}
}
