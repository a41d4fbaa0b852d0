// SPDX-License-Identifier: GPL-2.0-or-later
// rename(2) and readlink(2).
#include "errno.h"
#include "internal.h"
#include "mm.h"
#include "printk.h"
#include "string.h"
#include "syscalls.h"
#include "uaccess.h"

static DEFINE_MUTEX(s_vfs_rename_mutex);

/* Always the same order, so that two renames can't wait for one another. */
static noinline void lock_rename(struct dentry *p1, struct dentry *p2)
{
	mutex_lock(&s_vfs_rename_mutex);
	inode_lock(p1->d_inode);
	if (p1 != p2)
		inode_lock(p2->d_inode);
}

static noinline void unlock_rename(struct dentry *p1, struct dentry *p2)
{
	if (p1 != p2)
		inode_unlock(p2->d_inode);
	inode_unlock(p1->d_inode);
	mutex_unlock(&s_vfs_rename_mutex);
}

static bool is_subdir(struct dentry *dentry, struct dentry *ancestor)
{
	for (; dentry != dentry->d_parent; dentry = dentry->d_parent)
		if (dentry == ancestor)
			return true;
	return dentry == ancestor;
}

static int check_rename(struct nameidata *old_nd, struct nameidata *new_nd, struct dentry *old,
			struct dentry *new, unsigned int flags)
{
	if (d_is_negative(old))
		return -ENOENT;
	if (flags & RENAME_NOREPLACE && !d_is_negative(new))
		return -EEXIST;
	if (!S_ISDIR(old->d_inode->i_mode) && (trailing_slash(old_nd) || trailing_slash(new_nd)))
		return -ENOTDIR;
	if (is_subdir(new_nd->path.dentry, old))
		return -EINVAL;
	if (!d_is_negative(new) && is_subdir(old_nd->path.dentry, new))
		return -ENOTEMPTY;
	return 0;
}

static int rename_entries(struct nameidata *old_nd, struct nameidata *new_nd, struct dentry *old,
			  struct dentry *new, unsigned int flags)
{
	struct renamedata rd = {
		.old_mnt_userns = &init_user_ns,
		.old_dir = old_nd->path.dentry->d_inode,
		.old_dentry = old,
		.new_mnt_userns = &init_user_ns,
		.new_dir = new_nd->path.dentry->d_inode,
		.new_dentry = new,
		.flags = flags,
	};
	int error = check_rename(old_nd, new_nd, old, new, flags);

	return error ? error : vfs_rename(&rd);
}

static noinline int rename_locked(struct nameidata *old_nd, struct nameidata *new_nd,
				  unsigned int flags)
{
	struct dentry *old, *new;
	int error;

	old = __lookup_hash(&old_nd->last, old_nd->path.dentry, 0);
	if (IS_ERR(old))
		return (int)PTR_ERR(old);
	new = __lookup_hash(&new_nd->last, new_nd->path.dentry, LOOKUP_RENAME_TARGET);
	error = PTR_ERR_OR_ZERO(new);
	if (!error) {
		error = rename_entries(old_nd, new_nd, old, new, flags);
		dput(new);
	}
	dput(old);
	return error;
}

static int rename_parents(struct nameidata *old_nd, struct nameidata *new_nd, unsigned int flags)
{
	int error;

	if (old_nd->path.mnt != new_nd->path.mnt)
		return -EXDEV;
	if (old_nd->last_type != LAST_NORM)
		return -EBUSY;
	if (new_nd->last_type != LAST_NORM)
		return flags & RENAME_NOREPLACE ? -EEXIST : -EBUSY;
	lock_rename(old_nd->path.dentry, new_nd->path.dentry);
	error = rename_locked(old_nd, new_nd, flags);
	unlock_rename(old_nd->path.dentry, new_nd->path.dentry);
	return error;
}

int do_renameat2(int olddfd, struct filename *from, int newdfd, struct filename *to,
			unsigned int flags)
{
	struct nameidata old_nd, new_nd;
	int error = flags & ~RENAME_NOREPLACE ? -EINVAL : 0;

	if (!error && (IS_ERR(from) || IS_ERR(to)))
		error = (int)PTR_ERR(IS_ERR(from) ? from : to);
	if (!error) {
		error = path_parentat(&old_nd, olddfd, from, 0);
		if (!error) {
			error = path_parentat(&new_nd, newdfd, to, 0);
			if (!error)
				error = rename_parents(&old_nd, &new_nd, flags);
			terminate_walk(&new_nd);
		}
		terminate_walk(&old_nd);
	}
	putname(from);
	putname(to);
	return error;
}

SYSCALL_DEFINE2(rename, const char __user *, oldname, const char __user *, newname)
{
	return do_renameat2(AT_FDCWD, getname(oldname), AT_FDCWD, getname(newname), 0);
}

SYSCALL_DEFINE5(renameat2, int, olddfd, const char __user *, oldname, int, newdfd,
		const char __user *, newname, unsigned int, flags)
{
	return do_renameat2(olddfd, getname(oldname), newdfd, getname(newname), flags);
}

int vfs_readlink(struct dentry *dentry, char __user *buffer, int buflen)
{
	struct inode *inode = dentry->d_inode;
	const char *link;
	int len;

	if (!inode->i_op->get_link)
		return -EINVAL;
	link = inode->i_op->get_link(dentry, inode);
	if (IS_ERR(link))
		return (int)PTR_ERR(link);
	len = min((int)strlen(link), buflen);
	return copy_to_user(buffer, link, len) ? -EFAULT : len;
}

static long do_readlinkat(int dfd, const char __user *path, char __user *buf, int bufsiz)
{
	struct path p;
	int error;

	if (bufsiz <= 0)
		return -EINVAL;
	error = user_path_at(dfd, path, 0, &p);
	if (error)
		return error;
	touch_atime(&p);
	error = vfs_readlink(p.dentry, buf, bufsiz);
	path_put(&p);
	return error;
}

SYSCALL_DEFINE4(readlinkat, int, dfd, const char __user *, pathname, char __user *, buf, int, bufsiz)
{
	return do_readlinkat(dfd, pathname, buf, bufsiz);
}

SYSCALL_DEFINE3(readlink, const char __user *, path, char __user *, buf, int, bufsiz)
{
	return do_readlinkat(AT_FDCWD, path, buf, bufsiz);
}
