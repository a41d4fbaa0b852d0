// SPDX-License-Identifier: GPL-2.0-or-later
// Tables of open files: a number for each file of a task.
#include "bug.h"
#include "errno.h"
#include "fs.h"
#include "mm.h"
#include "printk.h"
#include "string.h"
#include "syscalls.h"

static struct kmem_cache *files_cachep;

__init void fdtable_init(void)
{
	files_cachep = kmem_cache_create("files_cache", sizeof(struct files_struct), 64, 0, NULL);
}

struct files_struct *alloc_files(void)
{
	struct files_struct *files = kmem_cache_zalloc(files_cachep, GFP_KERNEL);

	if (!files)
		return NULL;
	atomic_set(&files->count, 1);
	spin_lock_init(&files->file_lock);
	files->max_fds = NR_OPEN_DEFAULT;
	files->fd = files->fd_array;
	return files;
}

/* The lock is held, unless nobody else has the table. */
static noinline int expand_files(struct files_struct *files, unsigned int nr)
{
	unsigned int max_fds = files->max_fds;
	struct file **fd;

	if (nr >= NR_OPEN_MAX)
		return -EMFILE;
	while (max_fds <= nr)
		max_fds *= 2;
	fd = kcalloc(max_fds, sizeof(*fd), GFP_KERNEL);
	if (!fd)
		return -ENOMEM;
	memcpy(fd, files->fd, files->max_fds * sizeof(*fd));
	if (files->fd != files->fd_array)
		kfree(files->fd);
	files->fd = fd;
	files->max_fds = max_fds;
	return 0;
}

struct files_struct *dup_fd(struct files_struct *oldf)
{
	struct files_struct *newf = alloc_files();
	unsigned int i;

	if (!newf)
		return NULL;
	spin_lock(&oldf->file_lock);
	if (oldf->max_fds > newf->max_fds && expand_files(newf, oldf->max_fds - 1)) {
		spin_unlock(&oldf->file_lock);
		put_files_struct(newf);
		return NULL;
	}
	for (i = 0; i < oldf->max_fds; i++)
		if (oldf->fd[i] && oldf->fd[i] != ERR_PTR(-EBUSY))
			newf->fd[i] = get_file(oldf->fd[i]);
	newf->next_fd = oldf->next_fd;
	spin_unlock(&oldf->file_lock);
	return newf;
}

static noinline void close_files(struct files_struct *files)
{
	unsigned int i;
	struct file *file;

	for (i = 0; i < files->max_fds; i++) {
		file = files->fd[i];
		files->fd[i] = NULL;
		if (file && !IS_ERR(file))
			filp_close(file, files);
	}
}

void put_files_struct(struct files_struct *files)
{
	if (!atomic_dec_and_test(&files->count))
		return;
	close_files(files);
	if (files->fd != files->fd_array)
		kfree(files->fd);
	kmem_cache_free(files_cachep, files);
}

static __always_inline int __alloc_fd(struct files_struct *files, unsigned int start, unsigned int end)
{
	unsigned int fd = max(start, files->next_fd);
	int error;

	while (fd < files->max_fds && files->fd[fd])
		fd++;
	if (fd >= end)
		return -EMFILE;
	if (fd >= files->max_fds) {
		error = expand_files(files, fd);
		if (error)
			return error;
	}
	if (start <= files->next_fd)
		files->next_fd = fd + 1;
	files->fd[fd] = ERR_PTR(-EBUSY);
	return (int)fd;
}

/* A process of the host counts its descriptors itself: its number, for the length of a system call. */
static __always_inline unsigned int real_fd(unsigned int fd)
{
	return current->host_fd && current->host_fd == fd + 1 ? current->host_real_fd : fd;
}

static __always_inline int host_fd(int fd)
{
	if (fd < 0 || !current->host_fd)
		return fd;
	current->host_real_fd = fd;
	return (int)current->host_fd - 1;
}

/* A number that is reserved, but has no file yet, holds an error pointer. */
int alloc_fd(unsigned int start, unsigned int end, unsigned int flags __attribute__((unused)))
{
	struct files_struct *files = current->files;
	int fd;

	spin_lock(&files->file_lock);
	fd = host_fd(__alloc_fd(files, start, end));
	spin_unlock(&files->file_lock);
	return fd;
}

/* An adopted task gets its table with its first file. */
int get_unused_fd_flags(unsigned int flags)
{
	if (!current->files)
		current->files = alloc_files();
	if (!current->files)
		return -ENOMEM;
	return alloc_fd(0, NR_OPEN_MAX, flags);
}

static __always_inline void __put_unused_fd(struct files_struct *files, unsigned int fd)
{
	files->fd[fd] = NULL;
	files->next_fd = min(files->next_fd, fd);
}

void put_unused_fd(unsigned int fd)
{
	struct files_struct *files = current->files;

	fd = real_fd(fd);
	spin_lock(&files->file_lock);
	__put_unused_fd(files, fd);
	spin_unlock(&files->file_lock);
}

void fd_install(unsigned int fd, struct file *file)
{
	struct files_struct *files = current->files;

	fd = real_fd(fd);
	BUG_ON(fd >= files->max_fds);
	spin_lock(&files->file_lock);
	files->fd[fd] = file;
	spin_unlock(&files->file_lock);
}

static noinline struct file *pick_file(struct files_struct *files, unsigned int fd)
{
	struct file *file = ERR_PTR(-EBADF);

	if (!files)
		return file;
	spin_lock(&files->file_lock);
	if (fd < files->max_fds && !IS_ERR_OR_NULL(files->fd[fd])) {
		file = files->fd[fd];
		__put_unused_fd(files, fd);
	}
	spin_unlock(&files->file_lock);
	return file;
}

int close_fd(unsigned int fd)
{
	struct files_struct *files = current->files;
	struct file *file = pick_file(files, real_fd(fd));

	if (IS_ERR(file))
		return -EBADF;
	return filp_close(file, files);
}

static __always_inline struct file *files_lookup_fd(struct files_struct *files, unsigned int fd)
{
	struct file *file;

	if (fd >= files->max_fds)
		return NULL;
	file = files->fd[fd];
	return IS_ERR(file) ? NULL : file;
}

static noinline struct file *__fget(unsigned int fd)
{
	struct files_struct *files = current->files;
	struct file *file;

	if (!files)
		return NULL;
	spin_lock(&files->file_lock);
	file = files_lookup_fd(files, real_fd(fd));
	if (file)
		get_file(file);
	spin_unlock(&files->file_lock);
	return file;
}

struct file *fget(unsigned int fd)
{
	return __fget(fd);
}

unsigned long __fdget(unsigned int fd)
{
	return (unsigned long)__fget(fd);
}

unsigned long __fdget_pos(unsigned int fd)
{
	struct file *file = __fget(fd);

	if (file && (file->f_mode & FMODE_ATOMIC_POS))
		mutex_lock(&file->f_pos_lock);
	return (unsigned long)file;
}

static __always_inline int replace_fd(struct files_struct *files, struct file *file, unsigned int fd,
				      struct file **tofree)
{
	int error;

	if (fd >= files->max_fds) {
		error = expand_files(files, fd);
		if (error)
			return error == -EMFILE ? -EBADF : error;
	}
	if (files->fd[fd] == ERR_PTR(-EBUSY))
		return -EBUSY;
	*tofree = files->fd[fd];
	files->fd[fd] = get_file(file);
	return (int)fd;
}

/* The new number is closed first where it is open. */
static noinline int do_dup2(struct files_struct *files, struct file *file, unsigned int fd)
{
	struct file *tofree = NULL;
	int ret;

	spin_lock(&files->file_lock);
	ret = replace_fd(files, file, fd, &tofree);
	spin_unlock(&files->file_lock);
	if (tofree)
		filp_close(tofree, files);
	return ret;
}

static noinline int ksys_dup3(unsigned int oldfd, unsigned int newfd, int flags)
{
	struct file *file;
	int err;

	if ((flags & ~O_CLOEXEC) != 0 || oldfd == newfd)
		return -EINVAL;
	file = fget(oldfd);
	if (!file)
		return -EBADF;
	err = do_dup2(current->files, file, newfd);
	fput(file);
	return err;
}

SYSCALL_DEFINE3(dup3, unsigned int, oldfd, unsigned int, newfd, int, flags)
{
	return ksys_dup3(oldfd, newfd, flags);
}

SYSCALL_DEFINE2(dup2, unsigned int, oldfd, unsigned int, newfd)
{
	struct file *file;

	if (newfd != oldfd)
		return ksys_dup3(oldfd, newfd, 0);
	file = fget(oldfd);
	if (!file)
		return -EBADF;
	fput(file);
	return (int)oldfd;
}

SYSCALL_DEFINE1(dup, unsigned int, fildes)
{
	struct file *file = fget(fildes);
	int ret;

	if (!file)
		return -EBADF;
	ret = get_unused_fd_flags(0);
	if (ret >= 0)
		fd_install(ret, file);
	else
		fput(file);
	return ret;
}
