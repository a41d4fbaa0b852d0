// SPDX-License-Identifier: GPL-2.0-or-later
// Opening by name: the last component, created where asked for, and the checks before the open.
#include "errno.h"
#include "internal.h"
#include "mm.h"
#include "printk.h"

int may_open(const struct path *path, int acc_mode, int flag)
{
	struct inode *inode = path->dentry->d_inode;

	(void)flag; /* Linux: refuses flags for append-only inodes, which don't exist here. */
	if (S_ISLNK(inode->i_mode))
		return -ELOOP;
	if (S_ISDIR(inode->i_mode) && acc_mode & MAY_WRITE)
		return -EISDIR;
	return inode_permission(&init_user_ns, inode, MAY_OPEN | acc_mode);
}

static noinline int handle_truncate(struct file *filp)
{
	return do_truncate(&init_user_ns, filp->f_path.dentry, 0,
			   ATTR_MTIME | ATTR_CTIME | ATTR_OPEN, filp);
}

static int create_last(struct nameidata *nd, struct dentry *dentry, const struct open_flags *op)
{
	struct inode *dir = nd->path.dentry->d_inode;
	umode_t mode = op->mode & ~current->umask;
	int error = inode_permission(&init_user_ns, dir, MAY_WRITE | MAY_EXEC);

	if (error)
		return error;
	if (!dir->i_op->create)
		return -EACCES;
	return dir->i_op->create(&init_user_ns, dir, dentry, mode | S_IFREG,
				 op->open_flag & O_EXCL);
}

/* The entry of the last component, positive unless an error is returned. */
static noinline struct dentry *lookup_open(struct nameidata *nd, const struct open_flags *op,
				  bool *created)
{
	struct dentry *dir = nd->path.dentry, *dentry;
	int error = 0;

	inode_lock(dir->d_inode);
	dentry = __lookup_hash(&nd->last, dir, nd->flags | LOOKUP_OPEN);
	if (!IS_ERR(dentry) && d_is_negative(dentry)) {
		error = -ENOENT;
		if (op->open_flag & O_CREAT)
			error = create_last(nd, dentry, op);
		*created = !error;
	}
	inode_unlock(dir->d_inode);
	if (!error)
		return dentry;
	dput(dentry);
	return ERR_PTR(error);
}

/* Returns 1 where the last component was a link: there is another last component now. */
static int open_last_lookups(struct nameidata *nd, const struct open_flags *op, bool *created)
{
	struct dentry *dentry;
	int error;

	if (nd->last_type != LAST_NORM)
		return op->open_flag & O_CREAT ? -EISDIR : handle_dots(nd);
	if (trailing_slash(nd)) {
		if (op->open_flag & O_CREAT)
			return -EISDIR;
		nd->flags |= LOOKUP_FOLLOW | LOOKUP_DIRECTORY;
	}
	dentry = lookup_open(nd, op, created);
	if (IS_ERR(dentry))
		return (int)PTR_ERR(dentry);
	if (op->open_flag & O_EXCL && op->open_flag & O_CREAT && !*created) {
		dput(dentry);
		return -EEXIST;
	}
	if (S_ISLNK(dentry->d_inode->i_mode) && nd->flags & LOOKUP_FOLLOW) {
		error = follow_link(nd, dentry);
		return error ? error : 1;
	}
	step_into(nd, dentry);
	return 0;
}

static noinline int do_open(struct nameidata *nd, struct file *file, const struct open_flags *op,
		   bool created)
{
	struct inode *inode = nd->path.dentry->d_inode;
	int error, acc_mode = created ? 0 : op->acc_mode;
	bool truncate = op->open_flag & O_TRUNC && !created && S_ISREG(inode->i_mode);

	if (op->open_flag & O_CREAT && S_ISDIR(inode->i_mode))
		return -EISDIR;
	if (nd->flags & LOOKUP_DIRECTORY && !S_ISDIR(inode->i_mode))
		return -ENOTDIR;
	error = may_open(&nd->path, acc_mode, op->open_flag);
	if (!error)
		error = vfs_open(&nd->path, file);
	if (!error && truncate)
		error = handle_truncate(file);
	return error;
}

static noinline struct file *path_openat(struct nameidata *nd, int dfd, struct filename *name,
				const struct open_flags *op)
{
	struct file *file = alloc_empty_file(op->open_flag, current_cred());
	bool created = false;
	int error;

	if (IS_ERR(file))
		return file;
	error = path_init(nd, dfd, name, op->lookup_flags);
	if (!error)
		error = link_path_walk(name->walk, nd);
	if (!error) {
		do
			error = open_last_lookups(nd, op, &created);
		while (error > 0);
	}
	if (!error)
		error = do_open(nd, file, op, created);
	terminate_walk(nd);
	if (!error)
		return file;
	fput(file);
	return ERR_PTR(error);
}

struct file *do_filp_open(int dfd, struct filename *pathname, const struct open_flags *op)
{
	struct nameidata nd;

	return path_openat(&nd, dfd, pathname, op);
}
