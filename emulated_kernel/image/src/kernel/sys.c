// SPDX-License-Identifier: GPL-2.0-or-later
// Small system calls: who am I, and how is the machine called.
#include "errno.h"
#include "printk.h"
#include "sched.h"
#include "string.h"
#include "syscalls.h"
#include "uaccess.h"
#include "version.h"

SYSCALL_DEFINE0(getpid)
{
	return current->tgid;
}

SYSCALL_DEFINE0(gettid)
{
	return current->pid;
}

SYSCALL_DEFINE0(getppid)
{
	return current->real_parent->tgid;
}

SYSCALL_DEFINE0(getuid)
{
	return current_cred()->uid.val;
}

SYSCALL_DEFINE0(getgid)
{
	return current_cred()->gid.val;
}

SYSCALL_DEFINE1(setuid, uid_t, uid)
{
	struct cred *cred = current->cred;

	if (cred->euid.val && uid != cred->uid.val)
		return -EPERM;
	cred->euid = cred->fsuid = KUIDT_INIT(uid);
	if (!cred->uid.val)
		cred->uid = KUIDT_INIT(uid);
	return 0;
}

SYSCALL_DEFINE1(setgid, gid_t, gid)
{
	struct cred *cred = current->cred;

	if (cred->euid.val && gid != cred->gid.val)
		return -EPERM;
	cred->egid = cred->fsgid = KGIDT_INIT(gid);
	if (!cred->euid.val)
		cred->gid = KGIDT_INIT(gid);
	return 0;
}

SYSCALL_DEFINE1(umask, int, mask)
{
	u32 old = current->umask;

	current->umask = mask & 0777;
	return old;
}

SYSCALL_DEFINE0(sched_yield)
{
	do_sched_yield();
	return 0;
}

struct new_utsname {
	char sysname[65];
	char nodename[65];
	char release[65];
	char version[65];
	char machine[65];
	char domainname[65];
};

const struct new_utsname init_uts_ns = {
	.sysname = "Linux",
	.nodename = "kprobefs",
	.release = UTS_RELEASE,
	.version = UTS_VERSION,
	.machine = UTS_MACHINE,
	.domainname = "(none)",
};

SYSCALL_DEFINE1(newuname, struct new_utsname __user *, name)
{
	return copy_to_user(name, &init_uts_ns, sizeof(init_uts_ns)) ? -EFAULT : 0;
}
