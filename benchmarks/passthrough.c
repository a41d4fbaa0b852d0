// SPDX-License-Identifier: GPL-2.0-or-later
// A FUSE file system in C without a library, with which benchmarks/scratch.py and open_read_close.py compare.
// usage: passthrough FILE DIRECTORY [noflush]. FILE appears as DIRECTORY/file until the unmount. It needs root.
// Each name but "file" and "hits" is a directory, at any depth. A file `hits` contains a number as text.
// With `noflush`, the host's kernel sends no FLUSH at a close(2) after the first one, as for kprobefs.
#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

#define FILE_NODE 2
#define HITS_NODE 3
#define FIRST_DIRECTORY 4
#define MAX_WRITE (128 << 10)

static int device, backing, flush_error;
static unsigned long hits;
static char request[MAX_WRITE + 4096], data[MAX_WRITE];

static void answer(const struct fuse_in_header *in, int error, const void *body, size_t size)
{
	struct fuse_out_header out = { sizeof(out) + size, -error, in->unique };
	struct iovec parts[] = { { &out, sizeof(out) }, { (void *)body, size } };

	if (writev(device, parts, 2) < 0 && errno != ENOENT)
		exit(1);
}

static struct fuse_attr attributes(uint64_t node)
{
	struct fuse_attr attr = { .ino = node, .nlink = 1, .mode = S_IFDIR | 0755, .blksize = 4096 };
	struct stat st;

	if (node == HITS_NODE)
		attr.mode = S_IFREG | 0644;
	if (node == FILE_NODE && !fstat(backing, &st)) {
		attr.mode = S_IFREG | 0644;
		attr.size = (uint64_t)st.st_size;
	}
	return attr;
}

// The directories form one chain, so that the node of a directory says its depth.
static void lookup(const struct fuse_in_header *in, const char *name)
{
	struct fuse_entry_out out = { .nodeid = in->nodeid < FIRST_DIRECTORY ? FIRST_DIRECTORY : in->nodeid + 1 };

	if (!strcmp(name, "file"))
		out.nodeid = FILE_NODE;
	if (!strcmp(name, "hits"))
		out.nodeid = HITS_NODE;
	out.attr = attributes(out.nodeid);
	answer(in, 0, &out, sizeof(out));
}

static void write_file(const struct fuse_in_header *in, const struct fuse_write_in *arg)
{
	ssize_t count = pwrite(backing, arg + 1, arg->size, (off_t)arg->offset);
	struct fuse_write_out out = { (uint32_t)count, 0 };

	answer(in, count < 0 ? errno : 0, &out, count < 0 ? 0 : sizeof(out));
}

static void read_file(const struct fuse_in_header *in, const struct fuse_read_in *arg)
{
	ssize_t count;

	if (in->nodeid == HITS_NODE)
		count = arg->offset ? 0 : snprintf(data, sizeof(data), "%lu\n", ++hits);
	else
		count = pread(backing, data, arg->size < MAX_WRITE ? arg->size : MAX_WRITE, (off_t)arg->offset);

	answer(in, count < 0 ? errno : 0, data, count < 0 ? 0 : (size_t)count);
}

static void serve(const struct fuse_in_header *in)
{
	struct fuse_init_out init = { .major = 7, .minor = 31, .flags = FUSE_BIG_WRITES,
				      .max_write = MAX_WRITE, .max_background = 12 };
	struct fuse_attr_out attr = { .attr = attributes(in->nodeid) };
	struct fuse_open_out opened = { .open_flags = FOPEN_DIRECT_IO };
	const void *arg = in + 1;

	switch (in->opcode) {
	case FUSE_INIT:
		return answer(in, 0, &init, sizeof(init));
	case FUSE_LOOKUP:
		return lookup(in, arg);
	case FUSE_SETATTR:
		if (((const struct fuse_setattr_in *)arg)->valid & FATTR_SIZE)
			if (ftruncate(backing, (off_t)((const struct fuse_setattr_in *)arg)->size))
				return answer(in, errno, NULL, 0);
		attr.attr = attributes(in->nodeid);
		/* fall through */
	case FUSE_GETATTR:
		return answer(in, 0, &attr, sizeof(attr));
	case FUSE_OPEN:
		return answer(in, 0, &opened, sizeof(opened));
	case FUSE_READ:
		return read_file(in, arg);
	case FUSE_WRITE:
		return write_file(in, arg);
	case FUSE_FLUSH:
		return answer(in, flush_error, NULL, 0);
	case FUSE_RELEASE:
		return answer(in, 0, NULL, 0);
	case FUSE_FORGET:
	case FUSE_BATCH_FORGET:
		return;
	default:
		return answer(in, ENOSYS, NULL, 0);
	}
}

int main(int argc, char **argv)
{
	char options[100];

	if (argc != 3 && argc != 4)
		return 2;
	flush_error = argc == 4 ? ENOSYS : 0;
	device = open("/dev/fuse", O_RDWR);
	backing = open(argv[1], O_RDWR | O_CREAT, 0644);
	snprintf(options, sizeof(options), "fd=%d,rootmode=40000,user_id=0,group_id=0", device);
	if (device < 0 || backing < 0 || mount("passthrough", argv[2], "fuse", MS_NOSUID | MS_NODEV, options)) {
		perror("passthrough");
		return 1;
	}
	puts("mounted");
	fflush(stdout);
	while (read(device, request, sizeof(request)) > 0 || errno == EINTR || errno == ENOENT)
		serve((const struct fuse_in_header *)request);
	return 0;
}
