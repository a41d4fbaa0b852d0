/* Preloaded by `kprobefs run --as-system`: who opens /proc/mounts reads $KPROBEFS_MOUNTS instead, and what tracefs
 * can't splice fails to.
 *
 * libtracefs takes a tracefs by its type in that file, which FUSE can't have, and mounts a real one over
 * ours where it finds none. Of a file whose size is 0 FUSE splices nothing, without an error: who asks for that gets
 * the EINVAL that tracefs has for its files of text, and reads.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/sendfile.h>
#include <sys/stat.h>
#include <sys/vfs.h>

#define FUSE_SUPER_MAGIC 0x65735546

typedef FILE *(*opener)(const char *path, const char *mode);

static FILE *open_other(const char *name, const char *path, const char *mode)
{
	opener next = (opener)dlsym(RTLD_NEXT, name);
	const char *mounts = getenv("KPROBEFS_MOUNTS");

	if (mounts && !strcmp(path, "/proc/mounts"))
		path = mounts;
	return next(path, mode);
}

FILE *fopen(const char *path, const char *mode)
{
	return open_other("fopen", path, mode);
}

FILE *fopen64(const char *path, const char *mode)
{
	return open_other("fopen64", path, mode);
}

static int is_text(int fd)
{
	struct statfs fs;
	struct stat file;

	return !fstatfs(fd, &fs) && fs.f_type == FUSE_SUPER_MAGIC && !fstat(fd, &file) && S_ISREG(file.st_mode) &&
	       !file.st_size;
}

#define REFUSE(fd)                      \
	do {                            \
		if (is_text(fd)) {      \
			errno = EINVAL; \
			return -1;      \
		}                       \
	} while (0)

ssize_t sendfile(int out, int in, off_t *offset, size_t count)
{
	ssize_t (*next)(int, int, off_t *, size_t) = dlsym(RTLD_NEXT, "sendfile");

	REFUSE(in);
	return next(out, in, offset, count);
}

ssize_t sendfile64(int out, int in, off64_t *offset, size_t count)
{
	ssize_t (*next)(int, int, off64_t *, size_t) = dlsym(RTLD_NEXT, "sendfile64");

	REFUSE(in);
	return next(out, in, offset, count);
}

ssize_t splice(int in, off64_t *in_offset, int out, off64_t *out_offset, size_t count, unsigned int flags)
{
	ssize_t (*next)(int, off64_t *, int, off64_t *, size_t, unsigned int) = dlsym(RTLD_NEXT, "splice");

	REFUSE(in);
	return next(in, in_offset, out, out_offset, count, flags);
}

ssize_t copy_file_range(int in, off64_t *in_offset, int out, off64_t *out_offset, size_t count, unsigned int flags)
{
	ssize_t (*next)(int, off64_t *, int, off64_t *, size_t, unsigned int) = dlsym(RTLD_NEXT, "copy_file_range");

	REFUSE(in);
	return next(in, in_offset, out, out_offset, count, flags);
}
