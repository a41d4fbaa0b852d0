/* Preloaded by `kprobefs run --as-system`: who opens /proc/mounts reads $KPROBEFS_MOUNTS instead.
 *
 * libtracefs takes a tracefs by its type in that file, which FUSE can't have, and mounts a real one over
 * ours where it finds none.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

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
