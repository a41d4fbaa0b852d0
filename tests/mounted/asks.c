/* Asks in each way of C for the type of what is mounted at a directory; built static and dynamic.
 *
 * Prints a line for each way; with a second argument for those that are hard to answer.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mntent.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/time.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

static void in_table(const char *name, const char *directory)
{
	FILE *table = setmntent(name, "r");
	struct mntent *entry;
	const char *found = "nothing";

	while (table && (entry = getmntent(table)))
		if (!strcmp(entry->mnt_dir, directory) && strncmp(entry->mnt_type, "fuse", 4))
			found = strcmp(entry->mnt_type, "debugfs") ? "tracefs" : "debugfs";
	printf("%s %s\n", name, found);
}

static void at(const char *name, const char *path)
{
	struct statfs fs = { 0 };

	if (statfs(path, &fs) < 0)
		printf("%s error-%d\n", name, errno);
	else
		printf("%s %lx\n", name, (long)fs.f_type);
}

/* Through links of /proc, which lead to files themselves; this process and its child are in the directory. */
static void by_links(const char *directory, int file)
{
	char path[256];
	int child = fork();

	if (!child) {
		pause();
		_exit(0);
	}
	at("link-cwd", "/proc/self/cwd");
	at("link-dots", "/proc/self/cwd/../tracing/.");
	at("link-thread", "/proc/thread-self/cwd");
	snprintf(path, sizeof path, "/proc/self/root%s", directory);
	at("link-root", path);
	snprintf(path, sizeof path, "/proc/self/fd/%d", file);
	at("link-fd", path);
	snprintf(path, sizeof path, "/dev/fd/%d", file);
	at("link-dev", path);
	snprintf(path, sizeof path, "/proc/%d/cwd", getpid());
	at("link-pid", path);
	snprintf(path, sizeof path, "/proc/self/fd/%d/", open("README", O_RDONLY));
	at("text-as-directory", path);
	snprintf(path, sizeof path, "/proc/%d/cwd", child);
	at("link-child", path);
	kill(child, SIGKILL);
	waitpid(child, NULL, 0);
}

/* Into buffers of which all, or the second half, may only be read. */
static void into_read_only(const char *directory)
{
	char *pages = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	memset(pages, 7, 8192);
	mprotect(pages + 4096, 4096, PROT_READ);
	printf("read-only %d\n", statfs(directory, (struct statfs *)(pages + 4096)) < 0 ? errno : 0);
	printf("half-read-only %d\n", statfs(directory, (struct statfs *)(pages + 4096 - 64)) < 0 ? errno : 0);
	printf("last-byte %d\n", statfs(directory, (struct statfs *)(pages + 4096 - sizeof(struct statfs))) < 0 ? errno : 0);
	printf("untouched %d\n", pages[4096] == 7 && pages[4096 + sizeof(struct statfs)] == 7);
}

static void ignore(int number)
{
	(void)number;
}

/* While a timer interrupts this process more often than a question can be answered. */
static void interrupted(const char *directory)
{
	struct sigaction action = { .sa_handler = ignore, .sa_flags = SA_RESTART };
	struct itimerval often = { { 0, 200 }, { 0, 200 } };
	struct itimerval never = { { 0, 0 }, { 0, 0 } };
	struct statfs fs = { 0 };
	int answered = 0;

	sigaction(SIGALRM, &action, NULL);
	setitimer(ITIMER_REAL, &often, NULL);
	for (int i = 0; i < 20; i++)
		answered += !statfs(directory, &fs);
	setitimer(ITIMER_REAL, &never, NULL);
	printf("interrupted %d\n", answered);
}

int main(int count, char **words)
{
	static const char *tables[] = { "/proc/mounts", "/proc/self/mounts", "/etc/mtab" };
	const char *directory = words[1];
	struct statfs fs = { 0 };
	int file = open(directory, O_RDONLY);

	statfs(directory, &fs);
	printf("statfs %lx\n", (long)fs.f_type);
	memset(&fs, 0, sizeof fs);
	fstatfs(file, &fs);
	printf("fstatfs %lx %ld %ld %d\n", (long)fs.f_type, (long)fs.f_bsize, (long)fs.f_namelen, fs.f_blocks == 0);
	chdir(directory);
	if (count > 2) {
		by_links(directory, file);
		into_read_only(directory);
		interrupted(directory);
		return 0;
	}
	memset(&fs, 0, sizeof fs);
	statfs("instances/..", &fs);
	printf("relative %lx\n", (long)fs.f_type);
	printf("missing %d\n", statfs("nothing-there", &fs) < 0 ? errno : 0);
	printf("bad-address %d\n", statfs(directory, (struct statfs *)8) < 0 ? errno : 0);
	printf("bad-path %d\n", statfs((char *)-1, &fs) < 0 ? errno : 0);
	for (int i = 0; i < 3; i++)
		in_table(tables[i], directory);
	file = open("README", O_RDONLY);
	if (file >= 0) {
		printf("sendfile %d\n", sendfile(STDOUT_FILENO, file, NULL, 4096) < 0 ? errno : 0);
		printf("splice %d\n", splice(file, NULL, STDOUT_FILENO, NULL, 4096, 0) < 0 ? errno : 0);
		printf("copy %d\n", copy_file_range(file, NULL, STDOUT_FILENO, NULL, 4096, 0) < 0 ? errno : 0);
	}
	statfs("/proc", &fs);
	printf("other %lx\n", (long)fs.f_type);
	return 0;
}
