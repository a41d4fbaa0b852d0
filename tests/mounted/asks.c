/* Asks in each way of C for the type of what is mounted at a directory; built static and dynamic.
 *
 * Prints a line for each way.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <mntent.h>
#include <stdio.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/vfs.h>
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

int main(int count, char **words)
{
	static const char *tables[] = { "/proc/mounts", "/proc/self/mounts", "/etc/mtab" };
	const char *directory = words[1];
	struct statfs fs = { 0 };
	int file = open(directory, O_RDONLY);

	(void)count;
	statfs(directory, &fs);
	printf("statfs %lx\n", (long)fs.f_type);
	memset(&fs, 0, sizeof fs);
	fstatfs(file, &fs);
	printf("fstatfs %lx %ld %ld %d\n", (long)fs.f_type, (long)fs.f_bsize, (long)fs.f_namelen, fs.f_blocks == 0);
	chdir(directory);
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
