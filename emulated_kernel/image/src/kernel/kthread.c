// SPDX-License-Identifier: GPL-2.0-or-later
// kthreadd and the threads that it makes.
#include "errno.h"
#include "mm.h"
#include "sched.h"
#include "string.h"
#include "tracepoint.h"

struct kthread_create_info {
	int (*threadfn)(void *data);
	void *data;
	const char *name;
	struct task_struct *result;
	struct completion done;
	struct list_head list;
};

/* On the thread's own stack, which whoever stops it keeps by a reference. */
struct kthread {
	bool should_stop;
	struct completion exited;
};

struct task_struct *kthreadd_task;
static LIST_HEAD(kthread_create_list);
static DEFINE_SPINLOCK(kthread_create_lock);

static noinline int kthread(void *_create)
{
	struct kthread_create_info *create = _create;
	int (*threadfn)(void *) = create->threadfn;
	void *data = create->data;
	struct kthread self = { .should_stop = false };

	init_completion(&self.exited);
	current->worker_private = &self;
	current->vfork_done = &self.exited;
	__set_task_comm(current, create->name, false);
	create->result = current;
	set_current_state(TASK_UNINTERRUPTIBLE);
	complete(&create->done);
	schedule();
	kthread_exit(self.should_stop ? -EINTR : threadfn(data));
}

static noinline void create_kthread(struct kthread_create_info *create)
{
	pid_t pid = kernel_thread(kthread, create, CLONE_FS | CLONE_FILES);

	if (pid >= 0)
		return;
	create->result = ERR_PTR(pid);
	complete(&create->done);
}

static struct kthread_create_info *next_create(void)
{
	struct kthread_create_info *create = NULL;

	spin_lock(&kthread_create_lock);
	if (!list_empty(&kthread_create_list)) {
		create = list_first_entry(&kthread_create_list, struct kthread_create_info, list);
		list_del_init(&create->list);
	}
	spin_unlock(&kthread_create_lock);
	return create;
}

int kthreadd(void *unused __attribute__((unused)))
{
	struct kthread_create_info *create;

	__set_task_comm(current, "kthreadd", false);
	current->flags |= PF_NOFREEZE;
	for (;;) {
		set_current_state(TASK_IDLE);
		if (list_empty(&kthread_create_list))
			schedule();
		__set_current_state(TASK_RUNNING);
		while ((create = next_create()))
			create_kthread(create);
	}
	return 0;
}

struct task_struct *kthread_create_on_node(int (*threadfn)(void *), void *data,
					   int node __attribute__((unused)), const char *name)
{
	struct kthread_create_info create = { .threadfn = threadfn, .data = data, .name = name };

	init_completion(&create.done);
	spin_lock(&kthread_create_lock);
	list_add_tail(&create.list, &kthread_create_list);
	spin_unlock(&kthread_create_lock);
	wake_up_process(kthreadd_task);
	wait_for_completion(&create.done);
	return create.result;
}

struct task_struct *kthread_run(int (*threadfn)(void *), void *data, const char *name)
{
	struct task_struct *task = kthread_create_on_node(threadfn, data, -1, name);

	if (!IS_ERR(task))
		wake_up_process(task);
	return task;
}

bool kthread_should_stop(void)
{
	return READ_ONCE(((struct kthread *)current->worker_private)->should_stop);
}

/* Waits until the thread has ended; what its function returned. */
int kthread_stop(struct task_struct *k)
{
	struct kthread *kthread = k->worker_private;
	int ret;

	trace_sched_kthread_stop(k);
	get_task_struct(k);
	WRITE_ONCE(kthread->should_stop, true);
	wake_up_process(k);
	wait_for_completion(&kthread->exited);
	ret = k->exit_code;
	put_task_struct(k);
	trace_sched_kthread_stop_ret(ret);
	return ret;
}

void kthread_exit(long result)
{
	do_exit(result);
}
