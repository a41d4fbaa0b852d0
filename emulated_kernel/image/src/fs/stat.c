// SPDX-License-Identifier: GPL-2.0-or-later
// Reading attributes: stat(2) and its relatives.
#include "chrdev.h"
#include "errno.h"
#include "fs.h"
#include "printk.h"
#include "string.h"
#include "syscalls.h"
#include "uaccess.h"

void generic_fillattr(struct user_namespace *mnt_userns __attribute__((unused)),
		      struct inode *inode, struct kstat *stat)
{
	stat->dev = inode->i_sb->s_dev;
	stat->ino = inode->i_ino;
	stat->mode = inode->i_mode;
	stat->nlink = inode->i_nlink;
	stat->uid = inode->i_uid;
	stat->gid = inode->i_gid;
	stat->rdev = inode->i_rdev;
	stat->size = i_size_read(inode);
	stat->atime = inode->i_atime;
	stat->mtime = inode->i_mtime;
	stat->ctime = inode->i_ctime;
	stat->blksize = PAGE_SIZE;
	stat->blocks = 0;
}

static noinline int vfs_getattr_nosec(const struct path *path, struct kstat *stat, u32 request_mask,
			     unsigned int query_flags)
{
	struct inode *inode = path->dentry->d_inode;

	memset(stat, 0, sizeof(*stat));
	stat->result_mask = 0x7ff;
	if (inode->i_op->getattr)
		return inode->i_op->getattr(&init_user_ns, path, stat, request_mask, query_flags);
	generic_fillattr(&init_user_ns, inode, stat);
	return 0;
}

noinline int vfs_getattr(const struct path *path, struct kstat *stat, u32 request_mask,
			 unsigned int query_flags)
{
	return vfs_getattr_nosec(path, stat, request_mask, query_flags);
}

int vfs_fstat(int fd, struct kstat *stat)
{
	struct fd f = fdget(fd);
	int error;

	if (!f.file)
		return -EBADF;
	error = vfs_getattr(&f.file->f_path, stat, 0x7ff, 0);
	fdput(f);
	return error;
}

int vfs_statx(int dfd, struct filename *filename, int flags, struct kstat *stat, u32 mask)
{
	unsigned int lookup_flags = flags & AT_SYMLINK_NOFOLLOW ? 0 : LOOKUP_FOLLOW;
	struct path path;
	int error;

	if (flags & ~(AT_SYMLINK_NOFOLLOW | AT_NO_AUTOMOUNT | AT_EMPTY_PATH | AT_STATX_SYNC_TYPE))
		return -EINVAL;
	error = filename_lookup(dfd, filename, lookup_flags, &path, NULL);
	if (error)
		return error;
	error = vfs_getattr(&path, stat, mask, flags);
	path_put(&path);
	return error;
}

int vfs_fstatat(int dfd, const char __user *filename, struct kstat *stat, int flags)
{
	struct filename *name = getname_flags(filename, flags & AT_EMPTY_PATH ? LOOKUP_EMPTY : 0, NULL);
	int ret = vfs_statx(dfd, name, flags, stat, 0x7ff);

	putname(name);
	return ret;
}

static noinline int cp_new_stat(const struct kstat *stat, struct stat __user *statbuf)
{
	struct stat tmp = {
		.st_dev = stat->dev,
		.st_ino = stat->ino,
		.st_nlink = stat->nlink,
		.st_mode = stat->mode,
		.st_uid = stat->uid.val,
		.st_gid = stat->gid.val,
		.st_rdev = stat->rdev,
		.st_size = stat->size,
		.st_blksize = stat->blksize,
		.st_blocks = (s64)stat->blocks,
		.st_atime = stat->atime.tv_sec,
		.st_atime_nsec = stat->atime.tv_nsec,
		.st_mtime = stat->mtime.tv_sec,
		.st_mtime_nsec = stat->mtime.tv_nsec,
		.st_ctime = stat->ctime.tv_sec,
		.st_ctime_nsec = stat->ctime.tv_nsec,
	};

	return copy_to_user(statbuf, &tmp, sizeof(tmp)) ? -EFAULT : 0;
}

static long stat_to_user(int dfd, const char __user *filename, struct stat __user *statbuf,
			 int flags)
{
	struct kstat stat;
	int error = vfs_fstatat(dfd, filename, &stat, flags);

	return error ? error : cp_new_stat(&stat, statbuf);
}

SYSCALL_DEFINE2(newstat, const char __user *, filename, struct stat __user *, statbuf)
{
	return stat_to_user(AT_FDCWD, filename, statbuf, 0);
}

SYSCALL_DEFINE2(newlstat, const char __user *, filename, struct stat __user *, statbuf)
{
	return stat_to_user(AT_FDCWD, filename, statbuf, AT_SYMLINK_NOFOLLOW);
}

SYSCALL_DEFINE4(newfstatat, int, dfd, const char __user *, filename, struct stat __user *, statbuf,
		int, flag)
{
	return stat_to_user(dfd, filename, statbuf, flag);
}

SYSCALL_DEFINE2(newfstat, unsigned int, fd, struct stat __user *, statbuf)
{
	struct kstat stat;
	int error = vfs_fstat(fd, &stat);

	return error ? error : cp_new_stat(&stat, statbuf);
}

static noinline int cp_statx(const struct kstat *stat, struct statx __user *buffer)
{
	struct statx tmp = {
		.stx_mask = stat->result_mask,
		.stx_blksize = stat->blksize,
		.stx_nlink = stat->nlink,
		.stx_uid = stat->uid.val,
		.stx_gid = stat->gid.val,
		.stx_mode = stat->mode,
		.stx_ino = stat->ino,
		.stx_size = (u64)stat->size,
		.stx_blocks = stat->blocks,
		.stx_atime = { .tv_sec = stat->atime.tv_sec, .tv_nsec = (u32)stat->atime.tv_nsec },
		.stx_ctime = { .tv_sec = stat->ctime.tv_sec, .tv_nsec = (u32)stat->ctime.tv_nsec },
		.stx_mtime = { .tv_sec = stat->mtime.tv_sec, .tv_nsec = (u32)stat->mtime.tv_nsec },
		.stx_rdev_major = MAJOR(stat->rdev),
		.stx_rdev_minor = MINOR(stat->rdev),
		.stx_dev_major = MAJOR(stat->dev),
		.stx_dev_minor = MINOR(stat->dev),
	};

	return copy_to_user(buffer, &tmp, sizeof(tmp)) ? -EFAULT : 0;
}

noinline int do_statx(int dfd, struct filename *filename, unsigned int flags, unsigned int mask,
		      struct statx __user *buffer)
{
	struct kstat stat;
	int error = vfs_statx(dfd, filename, (int)flags, &stat, mask);

	return error ? error : cp_statx(&stat, buffer);
}

SYSCALL_DEFINE5(statx, int, dfd, const char __user *, filename, unsigned, flags, unsigned int, mask,
		struct statx __user *, buffer)
{
	struct filename *name = getname_flags(filename, flags & AT_EMPTY_PATH ? LOOKUP_EMPTY : 0, NULL);
	int ret = do_statx(dfd, name, flags, mask, buffer);

	putname(name);
	return ret;
}
