// SPDX-License-Identifier: GPL-2.0-or-later
// How tasks begin: copy_process() and kernel_clone().
#include "errno.h"
#include "fs.h"
#include "fs_struct.h"
#include "mm.h"
#include "printk.h"
#include "sched.h"
#include "string.h"
#include "syscalls.h"
#include "timer.h"
#include "tracepoint.h"

static struct kmem_cache *task_struct_cachep;
DEFINE_SPINLOCK(tasklist_lock);
unsigned long total_forks;
int nr_threads;

struct task_struct init_task __aligned(64) = {
	.stack = init_stack,
	.flags = PF_KTHREAD | PF_IDLE,
	.usage = ATOMIC_INIT(2),
	.comm = "swapper/0",
	.cred = &init_task.own_cred,
	.own_cred = { .usage = ATOMIC_INIT(2) },
	.real_parent = &init_task,
	.prio = DEFAULT_PRIO,
	.cpus_mask = CPU_MASK_ALL,
	.umask = 0, /* The host has applied its processes' own. */
	.wait_chldexit = { { 0 }, LIST_HEAD_INIT(init_task.wait_chldexit.head) },
	.children = LIST_HEAD_INIT(init_task.children),
	.sibling = LIST_HEAD_INIT(init_task.sibling),
	.tasks = LIST_HEAD_INIT(init_task.tasks),
	.se.group_node = LIST_HEAD_INIT(init_task.se.group_node),
};

static noinline unsigned long *alloc_thread_stack_node(struct task_struct *tsk)
{
	tsk->stack = (void *)__get_free_pages(GFP_KERNEL, THREAD_SIZE_ORDER);
	return tsk->stack;
}

static noinline void free_thread_stack(struct task_struct *tsk)
{
	free_pages((unsigned long)tsk->stack, THREAD_SIZE_ORDER);
	tsk->stack = NULL;
}

/* The host's adopted tasks have a page of their own, all others come from the cache. */
void free_task(struct task_struct *tsk)
{
	rethook_flush_task(tsk);
	free_thread_stack(tsk);
	if (virt_to_page(tsk)->flags & PG_slab)
		kmem_cache_free(task_struct_cachep, tsk);
	else
		free_page((unsigned long)tsk);
}

void put_task_struct(struct task_struct *tsk)
{
	if (atomic_dec_and_test(&tsk->usage))
		free_task(tsk);
}

static noinline struct task_struct *dup_task_struct(struct task_struct *orig)
{
	struct task_struct *tsk = kmem_cache_alloc(task_struct_cachep, GFP_KERNEL);

	if (!tsk)
		return NULL;
	*tsk = *orig;
	if (!alloc_thread_stack_node(tsk)) {
		kmem_cache_free(task_struct_cachep, tsk);
		return NULL;
	}
	atomic_set(&tsk->usage, 1);
	tsk->thread_pid = NULL;
	tsk->vfork_done = NULL;
	tsk->host_clone_pid = 0;
	tsk->host_file = 0;
	tsk->host_fd = tsk->host_names = tsk->host_lookup = 0;
	tsk->exit_state = tsk->exit_code = 0;
	tsk->worker_private = NULL;
	init_waitqueue_head(&tsk->wait_chldexit);
	rethook_init_task(tsk);
	INIT_LIST_HEAD(&tsk->children);
	INIT_LIST_HEAD(&tsk->sibling);
	return tsk;
}

static noinline int copy_creds(struct task_struct *p)
{
	p->own_cred = *current->cred;
	p->cred = &p->own_cred;
	atomic_set(&p->cred->usage, 1);
	return 0;
}

static noinline int copy_files(unsigned long clone_flags, struct task_struct *tsk)
{
	struct files_struct *oldf = current->files;

	if (!oldf)
		return 0;
	/* Host tasks share one table: a descriptor is the host's handle, whichever process uses it. */
	if ((clone_flags & CLONE_FILES) || (current->flags & PF_HOST)) {
		atomic_inc(&oldf->count);
		return 0;
	}
	tsk->files = dup_fd(oldf);
	return tsk->files ? 0 : -ENOMEM;
}

static void exit_files_of(struct task_struct *p)
{
	if (p->files)
		put_files_struct(p->files);
	exit_fs(p);
}

static void copy_flags(struct task_struct *p, struct kernel_clone_args *args)
{
	p->flags &= ~(PF_IDLE | PF_KTHREAD | PF_WQ_WORKER | PF_HOST | PF_NOFREEZE);
	p->flags |= PF_FORKNOEXEC;
	if (args->kthread)
		p->flags |= PF_KTHREAD;
	else if (!args->fn)
		p->flags |= PF_HOST;
}

static void link_task(struct task_struct *p)
{
	unsigned long flags;

	spin_lock_irqsave(&tasklist_lock, flags);
	list_add_tail(&p->sibling, &p->real_parent->children);
	list_add_tail(&p->tasks, &init_task.tasks);
	nr_threads++;
	total_forks++;
	spin_unlock_irqrestore(&tasklist_lock, flags);
}

struct task_struct *copy_process(struct pid *pid, int trace __attribute__((unused)),
				 int node __attribute__((unused)), struct kernel_clone_args *args)
{
	struct task_struct *p = dup_task_struct(current);
	int retval;

	if (!p)
		return ERR_PTR(-ENOMEM);
	copy_flags(p, args);
	p->exit_signal = args->exit_signal;
	sched_fork(args->flags, p);
	copy_creds(p);
	retval = copy_files(args->flags, p);
	if (retval)
		goto bad_fork_free;
	retval = copy_fs(args->flags, p);
	if (retval) {
		p->fs = NULL;
		goto bad_fork_cleanup_files;
	}
	copy_thread(p, args);
	pid = alloc_pid(&p->own_pid, args->set_tid);
	if (IS_ERR(pid)) {
		retval = (int)PTR_ERR(pid);
		goto bad_fork_cleanup_files;
	}
	attach_pid(p, pid);
	if (args->flags & CLONE_THREAD)
		p->tgid = current->tgid;
	p->start_time = ktime_get();
	p->real_parent = args->flags & CLONE_THREAD ? current->real_parent : current;
	link_task(p);
	trace_task_newtask(p, args->flags);
	return p;

bad_fork_cleanup_files:
	exit_files_of(p);
bad_fork_free:
	free_task(p);
	return ERR_PTR(retval);
}

/* A CPU's idle task: pid 0, in no list, and never freed. */
__init struct task_struct *fork_idle(int cpu)
{
	struct task_struct *idle = dup_task_struct(&init_task);

	if (!idle)
		return NULL;
	sched_fork(0, idle);
	atomic_set(&idle->usage, 2);
	idle->own_cred = *init_task.cred;
	idle->cred = &idle->own_cred;
	INIT_LIST_HEAD(&idle->tasks);
	snprintf(idle->comm, sizeof(idle->comm), "swapper/%d", cpu);
	return idle;
}

pid_t kernel_clone(struct kernel_clone_args *args)
{
	struct completion vfork;
	struct task_struct *p = copy_process(NULL, 0, -1, args);
	pid_t nr;

	if (IS_ERR(p))
		return (pid_t)PTR_ERR(p);
	trace_sched_process_fork(current, p);
	nr = p->pid;
	if (args->flags & CLONE_VFORK) {
		init_completion(&vfork);
		p->vfork_done = &vfork;
	}
	wake_up_new_task(p);
	if (args->flags & CLONE_VFORK)
		wait_for_completion(&vfork);
	return nr;
}

pid_t kernel_thread(int (*fn)(void *), void *arg, unsigned long flags)
{
	struct kernel_clone_args args = {
		.flags = flags | CLONE_VM,
		.fn = fn,
		.fn_arg = arg,
		.kthread = 1,
	};

	return kernel_clone(&args);
}

pid_t user_mode_thread(int (*fn)(void *), void *arg, unsigned long flags)
{
	struct kernel_clone_args args = {
		.flags = (flags | CLONE_VM) & ~CSIGNAL,
		.exit_signal = flags & CSIGNAL,
		.fn = fn,
		.fn_arg = arg,
	};

	return kernel_clone(&args);
}

static long clone_from_user(unsigned long flags)
{
	struct kernel_clone_args args = {
		.flags = flags & ~0xffUL,
		.exit_signal = flags & 0xff,
		.set_tid = current->host_clone_pid,
	};

	current->host_clone_pid = 0;
	return kernel_clone(&args);
}

/* The other arguments are for a process's own memory, which is none of the guest's. */
SYSCALL_DEFINE5(clone, unsigned long, clone_flags, unsigned long, newsp, int __user *, parent_tidptr,
		int __user *, child_tidptr, unsigned long, tls)
{
	(void)newsp, (void)parent_tidptr, (void)child_tidptr, (void)tls;
	return clone_from_user(clone_flags);
}

SYSCALL_DEFINE0(fork)
{
	return clone_from_user(SIGCHLD);
}

/* The parent doesn't wait: the host's child asks for its first system call only later. */
SYSCALL_DEFINE0(vfork)
{
	return clone_from_user(SIGCHLD | CLONE_VM);
}

void __set_task_comm(struct task_struct *tsk, const char *from, bool exec __attribute__((unused)))
{
	trace_task_rename(tsk, from);
	strscpy(tsk->comm, from, sizeof(tsk->comm));
}

char *__get_task_comm(char *buf, size_t buf_size, struct task_struct *tsk)
{
	strscpy(buf, tsk->comm, buf_size);
	return buf;
}

__init void fork_init(void)
{
	task_struct_cachep = kmem_cache_create("task_struct", sizeof(struct task_struct), 64, 0, NULL);
}
