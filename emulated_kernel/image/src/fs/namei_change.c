// SPDX-License-Identifier: GPL-2.0-or-later
// Changes of directories: create, mkdir, rmdir, unlink, symlink, link, rename.
#include "errno.h"
#include "internal.h"
#include "mm.h"
#include "printk.h"
#include "string.h"
#include "syscalls.h"
#include "uaccess.h"

static noinline int check_sticky(struct inode *dir, struct inode *inode)
{
	uid_t fsuid = current_cred()->fsuid.val;

	if (!(dir->i_mode & S_ISVTX) || !fsuid)
		return 0;
	return fsuid != inode->i_uid.val && fsuid != dir->i_uid.val;
}

int may_create(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *child)
{
	if (!d_is_negative(child))
		return -EEXIST;
	return inode_permission(mnt_userns, dir, MAY_WRITE | MAY_EXEC);
}

int may_delete(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *victim,
	       bool isdir)
{
	int error;

	if (d_is_negative(victim))
		return -ENOENT;
	error = inode_permission(mnt_userns, dir, MAY_WRITE | MAY_EXEC);
	if (error)
		return error;
	if (check_sticky(dir, victim->d_inode))
		return -EPERM;
	if (isdir != S_ISDIR(victim->d_inode->i_mode))
		return isdir ? -ENOTDIR : -EISDIR;
	return victim->d_mounted || victim == victim->d_parent ? -EBUSY : 0;
}

int vfs_create(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *dentry,
	       umode_t mode, bool want_excl)
{
	int error = may_create(mnt_userns, dir, dentry);

	if (error)
		return error;
	if (!dir->i_op->create)
		return -EACCES;
	return dir->i_op->create(mnt_userns, dir, dentry, (mode & S_IALLUGO) | S_IFREG, want_excl);
}

int vfs_mkdir(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *dentry,
	      umode_t mode)
{
	int error = may_create(mnt_userns, dir, dentry);

	if (error)
		return error;
	if (!dir->i_op->mkdir)
		return -EPERM;
	return dir->i_op->mkdir(mnt_userns, dir, dentry, mode & (S_IRWXUGO | S_ISVTX));
}

int vfs_rmdir(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *dentry)
{
	int error = may_delete(mnt_userns, dir, dentry, true);

	if (error)
		return error;
	if (!dir->i_op->rmdir)
		return -EPERM;
	error = dir->i_op->rmdir(dir, dentry);
	if (!error)
		d_delete(dentry);
	return error;
}

int vfs_unlink(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *dentry,
	       struct inode **delegated_inode __attribute__((unused)))
{
	int error = may_delete(mnt_userns, dir, dentry, false);

	if (error)
		return error;
	if (!dir->i_op->unlink)
		return -EPERM;
	error = dir->i_op->unlink(dir, dentry);
	if (!error)
		d_delete(dentry);
	return error;
}

int vfs_symlink(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *dentry,
		const char *oldname)
{
	int error = may_create(mnt_userns, dir, dentry);

	if (error)
		return error;
	if (!dir->i_op->symlink)
		return -EPERM;
	return dir->i_op->symlink(mnt_userns, dir, dentry, oldname);
}

int vfs_link(struct dentry *old_dentry, struct user_namespace *mnt_userns, struct inode *dir,
	     struct dentry *new_dentry, struct inode **delegated_inode __attribute__((unused)))
{
	struct inode *inode = old_dentry->d_inode;
	int error;

	if (!inode)
		return -ENOENT;
	error = may_create(mnt_userns, dir, new_dentry);
	if (error)
		return error;
	if (dir->i_sb != inode->i_sb)
		return -EXDEV;
	if (!dir->i_op->link || S_ISDIR(inode->i_mode))
		return -EPERM;
	return dir->i_op->link(old_dentry, dir, new_dentry);
}

int vfs_rename(struct renamedata *rd)
{
	struct dentry *old_dentry = rd->old_dentry, *new_dentry = rd->new_dentry;
	bool is_dir = S_ISDIR(old_dentry->d_inode->i_mode);
	int error;

	if (old_dentry->d_inode == new_dentry->d_inode)
		return 0;
	error = may_delete(rd->old_mnt_userns, rd->old_dir, old_dentry, is_dir);
	if (error)
		return error;
	if (d_is_negative(new_dentry))
		error = may_create(rd->new_mnt_userns, rd->new_dir, new_dentry);
	else
		error = may_delete(rd->new_mnt_userns, rd->new_dir, new_dentry, is_dir);
	if (error)
		return error;
	if (!rd->old_dir->i_op->rename)
		return -EPERM;
	error = rd->old_dir->i_op->rename(rd->new_mnt_userns, rd->old_dir, old_dentry, rd->new_dir,
					  new_dentry, rd->flags);
	if (!error)
		d_move(old_dentry, new_dentry);
	return error;
}

/* The parent's path, locked, and the negative entry that is to be made in it. */
struct dentry *filename_create(int dfd, struct filename *name, struct path *path,
			       unsigned int lookup_flags)
{
	struct nameidata nd;
	struct dentry *dentry;
	int error;

	if (IS_ERR(name))
		return ERR_CAST(name);
	error = path_parentat(&nd, dfd, name, lookup_flags);
	if (!error && nd.last_type != LAST_NORM)
		error = -EEXIST;
	if (!error && trailing_slash(&nd) && !(lookup_flags & LOOKUP_DIRECTORY))
		error = -ENOENT;
	if (error) {
		terminate_walk(&nd);
		return ERR_PTR(error);
	}
	*path = nd.path;
	path_get(path);
	inode_lock(path->dentry->d_inode);
	dentry = __lookup_hash(&nd.last, path->dentry, LOOKUP_CREATE | LOOKUP_EXCL | lookup_flags);
	if (!IS_ERR(dentry) && !d_is_negative(dentry)) {
		dput(dentry);
		dentry = ERR_PTR(-EEXIST);
	}
	terminate_walk(&nd);
	if (IS_ERR(dentry)) {
		inode_unlock(path->dentry->d_inode);
		path_put(path);
	}
	return dentry;
}

void done_path_create(struct path *path, struct dentry *dentry)
{
	dput(dentry);
	inode_unlock(path->dentry->d_inode);
	path_put(path);
}

int do_mkdirat(int dfd, struct filename *name, umode_t mode)
{
	struct path path;
	struct dentry *dentry = filename_create(dfd, name, &path, LOOKUP_DIRECTORY);
	int error = PTR_ERR_OR_ZERO(dentry);

	if (!error) {
		error = vfs_mkdir(&init_user_ns, path.dentry->d_inode, dentry,
				  mode & ~current->umask);
		done_path_create(&path, dentry);
	}
	putname(name);
	return error;
}

int vfs_mknod(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *dentry, umode_t mode,
	      dev_t dev)
{
	int error = may_create(mnt_userns, dir, dentry);

	if (error)
		return error;
	if ((mode & S_IFMT) == S_IFCHR && current_cred()->fsuid.val)
		return -EPERM;
	if (!dir->i_op->mknod)
		return -EPERM;
	return dir->i_op->mknod(mnt_userns, dir, dentry, mode, dev);
}

static int may_mknod(umode_t mode)
{
	switch (mode & S_IFMT) {
	case 0:
	case S_IFREG:
	case S_IFCHR:
	case S_IFIFO:
	case S_IFSOCK:
		return 0;
	case S_IFDIR:
		return -EPERM;
	default:
		return -EINVAL;
	}
}

static noinline int do_mknodat(int dfd, struct filename *name, umode_t mode, unsigned int dev)
{
	struct path path;
	struct dentry *dentry = ERR_PTR(may_mknod(mode));
	umode_t masked = mode & ~current->umask;
	int error = PTR_ERR_OR_ZERO(dentry);

	if (!error) {
		dentry = filename_create(dfd, name, &path, 0);
		error = PTR_ERR_OR_ZERO(dentry);
	}
	if (!error) {
		if (mode & S_IFMT & ~S_IFREG)
			error = vfs_mknod(&init_user_ns, path.dentry->d_inode, dentry, masked, dev);
		else
			error = vfs_create(&init_user_ns, path.dentry->d_inode, dentry, masked, true);
		done_path_create(&path, dentry);
	}
	putname(name);
	return error;
}

int do_symlinkat(struct filename *from, int newdfd, struct filename *to)
{
	struct path path;
	struct dentry *dentry;
	int error = PTR_ERR_OR_ZERO(from);

	if (!error) {
		dentry = filename_create(newdfd, to, &path, 0);
		error = PTR_ERR_OR_ZERO(dentry);
	}
	if (!error) {
		error = vfs_symlink(&init_user_ns, path.dentry->d_inode, dentry, from->name);
		done_path_create(&path, dentry);
	}
	putname(to);
	putname(from);
	return error;
}

int do_linkat(int olddfd, struct filename *old, int newdfd, struct filename *new, int flags)
{
	struct path old_path, new_path;
	struct dentry *dentry;
	int error = filename_lookup(olddfd, old, flags & AT_SYMLINK_FOLLOW ? LOOKUP_FOLLOW : 0, &old_path, NULL);

	if (!error) {
		dentry = filename_create(newdfd, new, &new_path, 0);
		error = PTR_ERR_OR_ZERO(dentry);
		if (!error) {
			error = vfs_link(old_path.dentry, &init_user_ns, new_path.dentry->d_inode,
					 dentry, NULL);
			done_path_create(&new_path, dentry);
		}
		path_put(&old_path);
	}
	putname(old);
	putname(new);
	return error;
}

/* Looks the last component up in its locked parent and removes it. */
static int remove_last(struct nameidata *nd, bool isdir)
{
	struct inode *dir = nd->path.dentry->d_inode, *inode = NULL;
	struct dentry *dentry;
	int error;

	inode_lock(dir);
	dentry = __lookup_hash(&nd->last, nd->path.dentry, isdir ? LOOKUP_DIRECTORY : 0);
	error = PTR_ERR_OR_ZERO(dentry);
	if (!error) {
		inode = dentry->d_inode;
		if (inode)
			ihold(inode);
		if (!inode)
			error = -ENOENT;
		else if (isdir)
			error = vfs_rmdir(&init_user_ns, dir, dentry);
		else
			error = vfs_unlink(&init_user_ns, dir, dentry, NULL);
		dput(dentry);
	}
	inode_unlock(dir);
	if (inode)
		iput(inode);
	return error;
}

int do_rmdir(int dfd, struct filename *name)
{
	struct nameidata nd;
	int error = PTR_ERR_OR_ZERO(name);

	if (error)
		return error;
	error = path_parentat(&nd, dfd, name, 0);
	if (!error) {
		switch (nd.last_type) {
		case LAST_DOTDOT:
			error = -ENOTEMPTY;
			break;
		case LAST_DOT:
			error = -EINVAL;
			break;
		case LAST_ROOT:
			error = -EBUSY;
			break;
		default:
			error = remove_last(&nd, true);
		}
	}
	terminate_walk(&nd);
	putname(name);
	return error;
}

int do_unlinkat(int dfd, struct filename *name)
{
	struct nameidata nd;
	int error = PTR_ERR_OR_ZERO(name);

	if (error)
		return error;
	error = path_parentat(&nd, dfd, name, 0);
	if (!error && nd.last_type != LAST_NORM)
		error = -EISDIR;
	if (!error && trailing_slash(&nd))
		error = -ENOTDIR;
	if (!error)
		error = remove_last(&nd, false);
	terminate_walk(&nd);
	putname(name);
	return error;
}

SYSCALL_DEFINE2(mkdir, const char __user *, pathname, umode_t, mode)
{
	return do_mkdirat(AT_FDCWD, getname(pathname), mode);
}

SYSCALL_DEFINE3(mkdirat, int, dfd, const char __user *, pathname, umode_t, mode)
{
	return do_mkdirat(dfd, getname(pathname), mode);
}

SYSCALL_DEFINE4(mknodat, int, dfd, const char __user *, filename, umode_t, mode, unsigned int, dev)
{
	return do_mknodat(dfd, getname(filename), mode, dev);
}

SYSCALL_DEFINE3(mknod, const char __user *, filename, umode_t, mode, unsigned, dev)
{
	return do_mknodat(AT_FDCWD, getname(filename), mode, dev);
}

SYSCALL_DEFINE1(rmdir, const char __user *, pathname)
{
	return do_rmdir(AT_FDCWD, getname(pathname));
}

SYSCALL_DEFINE1(unlink, const char __user *, pathname)
{
	return do_unlinkat(AT_FDCWD, getname(pathname));
}

SYSCALL_DEFINE3(unlinkat, int, dfd, const char __user *, pathname, int, flag)
{
	if (flag & ~AT_REMOVEDIR)
		return -EINVAL;
	if (flag & AT_REMOVEDIR)
		return do_rmdir(dfd, getname(pathname));
	return do_unlinkat(dfd, getname(pathname));
}

SYSCALL_DEFINE2(symlink, const char __user *, oldname, const char __user *, newname)
{
	return do_symlinkat(getname(oldname), AT_FDCWD, getname(newname));
}

SYSCALL_DEFINE3(symlinkat, const char __user *, oldname, int, newdfd, const char __user *, newname)
{
	return do_symlinkat(getname(oldname), newdfd, getname(newname));
}

SYSCALL_DEFINE5(linkat, int, olddfd, const char __user *, oldname, int, newdfd,
		const char __user *, newname, int, flags)
{
	if (flags & ~AT_SYMLINK_FOLLOW)
		return -EINVAL;
	return do_linkat(olddfd, getname(oldname), newdfd, getname(newname), flags);
}

SYSCALL_DEFINE2(link, const char __user *, oldname, const char __user *, newname)
{
	return do_linkat(AT_FDCWD, getname(oldname), AT_FDCWD, getname(newname), 0);
}
