/* Tries to reach the host's tracefs or debugfs from `kprobefs run --as-system`, in each way that is known.
 *
 * Built without libraries of its own, so that nothing but the kernel answers. Prints a line for each way: its name,
 * and the errno or "reached".
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/perf_event.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

static const char *base;

static void tell(const char *name, long result)
{
	if (result < 0)
		printf("%s %s\n", name, strerrorname_np(errno));
	else
		printf("%s reached\n", name);
	fflush(stdout);
}

static int new_mount(const char *type)
{
	int made = syscall(SYS_fsopen, type, 0);

	if (made < 0 || syscall(SYS_fsconfig, made, 6 /* CREATE */, NULL, NULL, 0) < 0)
		return -1;
	return syscall(SYS_fsmount, made, 0, 0);
}

static int by_pid(long pid, const char *rest)
{
	char path[128];

	snprintf(path, sizeof path, "/proc/%ld/%s", pid, rest);
	return open(path, O_RDONLY);
}

static int enter(long pid, const char *rest)
{
	int space = by_pid(pid, rest);

	return space < 0 ? -1 : setns(space, 0);
}

static int event(unsigned int type, unsigned long config)
{
	struct perf_event_attr attr = { .type = type, .size = sizeof attr, .config = config };

	attr.exclude_kernel = 1;
	return syscall(SYS_perf_event_open, &attr, 0, -1, -1, 0);
}

/* A namespace below this one, where its maker has all rights again. */
static void nested(int (*act)(void), const char *name, int flags)
{
	if (!fork()) {
		if (unshare(flags) < 0)
			tell(name, -1);
		else
			tell(name, act());
		exit(0);
	}
	wait(NULL);
}

static int act_mount(void)
{
	return mount("nodev", "/sys/kernel/tracing", "tracefs", 0, NULL);
}

static int act_umount(void)
{
	return umount2("/sys/kernel/tracing", MNT_DETACH);
}

static int act_sysfs(void)
{
	char path[256];

	snprintf(path, sizeof path, "%s/sys", base);
	mkdir(path, 0755);
	/* May work; what counts is whether a tracefs gets there. */
	if (mount("sysfs", path, "sysfs", 0, NULL) < 0)
		return -1;
	strcat(path, "/kernel/tracing");
	return mount("nodev", path, "tracefs", 0, NULL);
}

static int writable(const char *path)
{
	return open(path, O_WRONLY);
}

/* A /proc of a namespace of pids of its own. */
static int act_proc(void)
{
	char path[256];
	int status;

	snprintf(path, sizeof path, "%s/proc", base);
	mkdir(path, 0755);
	if (fork()) {
		wait(&status);
		errno = WEXITSTATUS(status);
		return errno ? -1 : 0;
	}
	if (mount("proc", path, "proc", MS_MGC_VAL | MS_NOSUID, NULL) < 0)
		exit(ENOSYS);
	if (mount("proc", path, NULL, MS_REMOUNT | MS_BIND, NULL) == 0 || errno != EPERM)
		exit(ENOTUNIQ);
	if (mount("proc", path, "proc", MS_REMOUNT, NULL) == 0 || errno != EPERM)
		exit(ENOTUNIQ);
	strcat(path, "/sys/kernel/core_pattern");
	exit(writable(path) < 0 ? errno : 0);
}

static int act_new_proc(void)
{
	int status;

	if (!fork())
		exit(new_mount("proc") < 0 ? errno : 0);
	wait(&status);
	errno = WEXITSTATUS(status);
	return errno ? -1 : 0;
}

int main(int count, char **words)
{
	char place[256];
	long parent = getppid();

	(void)count;
	base = words[1];
	snprintf(place, sizeof place, "%s/place", base);
	mkdir(place, 0755);
	tell("mount-over", act_mount());
	tell("mount-tracefs", mount("nodev", place, "tracefs", 0, NULL));
	tell("mount-debugfs", mount("nodev", place, "debugfs", 0, NULL));
	tell("fsopen-tracefs", new_mount("tracefs"));
	tell("fsopen-debugfs", new_mount("debugfs"));
	tell("remount", mount("nodev", "/sys/kernel/tracing", "tracefs", MS_REMOUNT, NULL));
	tell("umount-tracing", umount2("/sys/kernel/tracing", 0));
	tell("detach-tracing", act_umount());
	tell("detach-debug", umount2("/sys/kernel/debug", MNT_DETACH));
	tell("detach-sys", umount2("/sys", MNT_DETACH));
	tell("move-tracing", mount("/sys/kernel/tracing", place, NULL, MS_MOVE, NULL));
	tell("bind-below", mount("/sys", place, NULL, MS_BIND, NULL));
	tell("tree-below", syscall(SYS_open_tree, AT_FDCWD, "/sys", 1));
	tell("root-of-1", by_pid(1, "root/sys/kernel"));
	tell("root-of-parent", by_pid(parent == 1 ? 1 : atol(words[2]), "root/sys/kernel"));
	tell("setns-1", enter(1, "ns/mnt"));
	tell("setns-user-1", enter(1, "ns/user"));
	tell("setns-parent", enter(atol(words[2]), "ns/mnt"));
	tell("perf-tracepoint", event(PERF_TYPE_TRACEPOINT, 1));
	tell("perf-software", event(PERF_TYPE_SOFTWARE, 0));
	nested(act_mount, "nested-mount", CLONE_NEWUSER | CLONE_NEWNS);
	nested(act_umount, "nested-detach", CLONE_NEWUSER | CLONE_NEWNS);
	nested(act_umount, "nested-namespace-detach", CLONE_NEWNS);
	tell("sysctl", writable("/proc/sys/kernel/core_pattern"));
	tell("sysfs", writable("/sys/devices/system/clocksource/clocksource0/current_clocksource"));
	nested(act_proc, "own-proc", CLONE_NEWNS | CLONE_NEWPID);
	nested(act_proc, "nested-proc", CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWPID);
	nested(act_new_proc, "new-proc", CLONE_NEWNS | CLONE_NEWPID);
	nested(act_sysfs, "new-sysfs", CLONE_NEWNS | CLONE_NEWNET);
	return 0;
}
