// SPDX-License-Identifier: GPL-2.0-or-later
// execve(): a task gets another program's name; the program itself runs on the host, which looked it up.
#include "errno.h"
#include "fs.h"
#include "sched.h"
#include "string.h"
#include "syscalls.h"
#include "tracepoint.h"

static const char *kbasename(const char *path)
{
	const char *tail = strrchr(path, '/');

	return tail ? tail + 1 : path;
}

static noinline void begin_new_exec(struct filename *filename)
{
	__set_task_comm(current, kbasename(filename->name), true);
	current->flags &= ~PF_FORKNOEXEC;
}

static noinline int exec_binprm(struct filename *filename)
{
	pid_t old_pid = current->pid;

	begin_new_exec(filename);
	trace_sched_process_exec(current, old_pid, filename->name);
	return 0;
}

static noinline int do_execveat_common(struct filename *filename)
{
	int retval;

	if (IS_ERR(filename))
		return (int)PTR_ERR(filename);
	retval = exec_binprm(filename);
	putname(filename);
	return retval;
}

int kernel_execve(const char *filename)
{
	return do_execveat_common(getname_kernel(filename));
}

SYSCALL_DEFINE3(execve, const char __user *, filename, const char __user *const __user *, argv,
		const char __user *const __user *, envp)
{
	(void)argv, (void)envp;
	return do_execveat_common(getname(filename));
}
