// SPDX-License-Identifier: GPL-2.0-or-later
// Changing attributes: who may, and the change itself.
#include "errno.h"
#include "fs.h"
#include "printk.h"
#include "syscalls.h"
#include "uaccess.h"

#define UTIME_NOW ((1L << 30) - 1L)
#define UTIME_OMIT ((1L << 30) - 2L)

static bool chown_ok(const struct inode *inode, kuid_t uid)
{
	uid_t fsuid = current_cred()->fsuid.val;

	return !fsuid || (fsuid == inode->i_uid.val && uid.val == inode->i_uid.val);
}

static bool chgrp_ok(const struct inode *inode, kgid_t gid)
{
	uid_t fsuid = current_cred()->fsuid.val;

	if (!fsuid)
		return true;
	return fsuid == inode->i_uid.val &&
	       (gid.val == inode->i_gid.val || gid.val == current_cred()->fsgid.val);
}

int inode_newsize_ok(const struct inode *inode, loff_t offset)
{
	if (offset < 0)
		return -EINVAL;
	return offset > inode->i_sb->s_maxbytes ? -EFBIG : 0;
}

int setattr_prepare(struct user_namespace *mnt_userns, struct dentry *dentry, struct iattr *attr)
{
	struct inode *inode = dentry->d_inode;
	unsigned int ia_valid = attr->ia_valid;
	int error;

	if (ia_valid & ATTR_SIZE) {
		error = inode_newsize_ok(inode, attr->ia_size);
		if (error)
			return error;
	}
	if (ia_valid & ATTR_FORCE)
		return 0;
	if (ia_valid & ATTR_UID && !chown_ok(inode, attr->ia_uid))
		return -EPERM;
	if (ia_valid & ATTR_GID && !chgrp_ok(inode, attr->ia_gid))
		return -EPERM;
	if (ia_valid & (ATTR_MODE | ATTR_ATIME_SET | ATTR_MTIME_SET) &&
	    !inode_owner_or_capable(mnt_userns, inode))
		return -EPERM;
	return 0;
}

void setattr_copy(struct user_namespace *mnt_userns __attribute__((unused)), struct inode *inode,
		  const struct iattr *attr)
{
	unsigned int ia_valid = attr->ia_valid;

	if (ia_valid & ATTR_UID)
		inode->i_uid = attr->ia_uid;
	if (ia_valid & ATTR_GID)
		inode->i_gid = attr->ia_gid;
	if (ia_valid & ATTR_ATIME)
		inode->i_atime = attr->ia_atime;
	if (ia_valid & ATTR_MTIME)
		inode->i_mtime = attr->ia_mtime;
	if (ia_valid & ATTR_CTIME)
		inode->i_ctime = attr->ia_ctime;
	if (ia_valid & ATTR_MODE)
		inode->i_mode = attr->ia_mode;
}

static int may_setattr(struct user_namespace *mnt_userns, struct inode *inode,
		       unsigned int ia_valid)
{
	if (!(ia_valid & ATTR_TOUCH) || inode_owner_or_capable(mnt_userns, inode))
		return 0;
	return inode_permission(mnt_userns, inode, MAY_WRITE);
}

/* The caller holds the inode's lock. */
int notify_change(struct user_namespace *mnt_userns, struct dentry *dentry, struct iattr *attr,
		  struct inode **delegated_inode __attribute__((unused)))
{
	struct inode *inode = dentry->d_inode;
	struct timespec64 now = current_time(inode);
	int error = may_setattr(mnt_userns, inode, attr->ia_valid);

	if (error)
		return error;
	attr->ia_ctime = now;
	if (!(attr->ia_valid & ATTR_ATIME_SET))
		attr->ia_atime = now;
	if (!(attr->ia_valid & ATTR_MTIME_SET))
		attr->ia_mtime = now;
	if (attr->ia_valid & ATTR_SIZE)
		attr->ia_valid |= ATTR_MTIME | ATTR_CTIME;
	if (attr->ia_valid & (ATTR_UID | ATTR_GID) && !S_ISDIR(inode->i_mode)) {
		attr->ia_valid |= ATTR_MODE;
		attr->ia_mode = inode->i_mode & ~(S_ISUID | S_ISGID);
	}
	if (inode->i_op->setattr)
		return inode->i_op->setattr(mnt_userns, dentry, attr);
	return simple_setattr(mnt_userns, dentry, attr);
}

static void set_times(struct iattr *attrs, const struct timespec64 *times)
{
	attrs->ia_valid = ATTR_CTIME | ATTR_ATIME | ATTR_MTIME;
	if (!times) {
		attrs->ia_valid |= ATTR_TOUCH;
		return;
	}
	if (times[0].tv_nsec == UTIME_OMIT)
		attrs->ia_valid &= ~ATTR_ATIME;
	else if (times[0].tv_nsec != UTIME_NOW)
		attrs->ia_valid |= ATTR_ATIME_SET;
	if (times[1].tv_nsec == UTIME_OMIT)
		attrs->ia_valid &= ~ATTR_MTIME;
	else if (times[1].tv_nsec != UTIME_NOW)
		attrs->ia_valid |= ATTR_MTIME_SET;
	attrs->ia_atime = times[0];
	attrs->ia_mtime = times[1];
}

int vfs_utimes(const struct path *path, const struct timespec64 *times)
{
	struct inode *inode = path->dentry->d_inode;
	struct iattr newattrs;
	int error;

	set_times(&newattrs, times);
	inode_lock(inode);
	error = notify_change(&init_user_ns, path->dentry, &newattrs, NULL);
	inode_unlock(inode);
	return error;
}

static noinline long do_utimes_fd(int fd, const struct timespec64 *times, int flags)
{
	struct fd f = fdget(fd);
	int error;

	if (!f.file)
		return -EBADF;
	error = flags ? -EINVAL : vfs_utimes(&f.file->f_path, times);
	fdput(f);
	return error;
}

static noinline long do_utimes(int dfd, const char __user *filename, const struct timespec64 *times,
		      int flags)
{
	struct path path;
	int error;

	if (flags & ~AT_SYMLINK_NOFOLLOW)
		return -EINVAL;
	if (!filename && dfd != AT_FDCWD)
		return do_utimes_fd(dfd, times, flags);
	error = user_path_at(dfd, filename, flags & AT_SYMLINK_NOFOLLOW ? 0 : LOOKUP_FOLLOW, &path);
	if (error)
		return error;
	error = vfs_utimes(&path, times);
	path_put(&path);
	return error;
}

SYSCALL_DEFINE4(utimensat, int, dfd, const char __user *, filename, struct __kernel_timespec __user *, utimes, int,
		flags)
{
	struct timespec64 tstimes[2];

	if (!utimes)
		return do_utimes(dfd, filename, NULL, flags);
	if (copy_from_user(tstimes, utimes, sizeof(tstimes)))
		return -EFAULT;
	return do_utimes(dfd, filename, tstimes, flags);
}
