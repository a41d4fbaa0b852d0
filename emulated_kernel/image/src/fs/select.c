// SPDX-License-Identifier: GPL-2.0-or-later
// poll(2): sleeps on the wait queues of several files at once.
#include "errno.h"
#include "freezer.h"
#include "fs.h"
#include "mm.h"
#include "poll.h"
#include "printk.h"
#include "syscalls.h"
#include "uaccess.h"

#define DEFAULT_POLLMASK (EPOLLIN | EPOLLOUT | EPOLLRDNORM | EPOLLWRNORM)
#define POLL_FDS_MAX 64

/* NULL: the events alone are asked for. */
void poll_wait(struct file *filp, wait_queue_head_t *wait_address, poll_table *p)
{
	struct poll_table_entry *entry;

	if (!p || p->nr == POLL_QUEUES)
		return;
	entry = &p->entries[p->nr++];
	entry->filp = get_file(filp);
	entry->wait_address = wait_address;
	init_waitqueue_func_entry(&entry->wait, default_wake_function);
	add_wait_queue(wait_address, &entry->wait);
}

static noinline void poll_freewait(poll_table *p)
{
	while (p->nr--) {
		remove_wait_queue(p->entries[p->nr].wait_address, &p->entries[p->nr].wait);
		fput(p->entries[p->nr].filp);
	}
}

unsigned int vfs_poll(struct file *file, poll_table *wait)
{
	return file->f_op->poll ? file->f_op->poll(file, wait) : DEFAULT_POLLMASK;
}

static noinline unsigned int do_pollfd(struct pollfd *pollfd, poll_table *wait)
{
	unsigned int filter = (unsigned short)pollfd->events | EPOLLERR | EPOLLHUP, mask;
	struct fd f;

	if (pollfd->fd < 0)
		return 0;
	f = fdget(pollfd->fd);
	if (!f.file)
		return EPOLLNVAL;
	mask = vfs_poll(f.file, wait) & filter;
	fdput(f);
	return mask;
}

static int poll_once(struct pollfd *fds, unsigned int nfds, poll_table *wait)
{
	unsigned int i;
	int count = 0;

	for (i = 0; i < nfds; i++) {
		fds[i].revents = (short)do_pollfd(&fds[i], wait);
		count += fds[i].revents != 0;
	}
	return count;
}

static noinline int do_poll(struct pollfd *fds, unsigned int nfds, long timeout)
{
	poll_table table = { .nr = 0 };
	int count;

	set_current_state(TASK_INTERRUPTIBLE);
	count = poll_once(fds, nfds, &table);
	while (!count && timeout) {
		timeout = schedule_timeout(timeout);
		try_to_freeze();
		set_current_state(TASK_INTERRUPTIBLE);
		count = poll_once(fds, nfds, NULL);
	}
	__set_current_state(TASK_RUNNING);
	poll_freewait(&table);
	return count;
}

static noinline int do_sys_poll(struct pollfd __user *ufds, unsigned int nfds, long timeout)
{
	struct pollfd *fds;
	int ret = -EFAULT;

	if (nfds > POLL_FDS_MAX)
		return -EINVAL;
	fds = kcalloc(nfds + 1, sizeof(*fds), GFP_KERNEL);
	if (!fds)
		return -ENOMEM;
	if (!copy_from_user(fds, ufds, nfds * sizeof(*fds))) {
		ret = do_poll(fds, nfds, timeout);
		if (copy_to_user(ufds, fds, nfds * sizeof(*fds)))
			ret = -EFAULT;
	}
	kfree(fds);
	return ret;
}

SYSCALL_DEFINE3(poll, struct pollfd __user *, ufds, unsigned int, nfds, int, timeout_msecs)
{
	long timeout = timeout_msecs < 0 ? MAX_SCHEDULE_TIMEOUT : (long)msecs_to_jiffies(timeout_msecs);

	return do_sys_poll(ufds, nfds, timeout);
}

/* Deviates: no signal ever comes, and what is left of the time isn't written back. */
SYSCALL_DEFINE5(ppoll, struct pollfd __user *, ufds, unsigned int, nfds, struct __kernel_timespec __user *, tsp,
		const sigset_t __user *, sigmask, size_t, sigsetsize)
{
	long timeout = MAX_SCHEDULE_TIMEOUT;
	u64 ns;
	int err;

	if (tsp) {
		err = get_duration(&ns, tsp);
		if (err)
			return err;
		timeout = (long)min((ns + TICK_NSEC - 1) / TICK_NSEC, (u64)MAX_SCHEDULE_TIMEOUT);
	}
	if (sigmask && sigsetsize != sizeof(u64))
		return -EINVAL;
	return do_sys_poll(ufds, nfds, timeout);
}
