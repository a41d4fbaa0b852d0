// SPDX-License-Identifier: GPL-2.0-or-later
// What simple file systems have in common: trees that live in the dentries alone.
#include "errno.h"
#include "fs.h"
#include "mm.h"
#include "printk.h"

struct dentry *simple_lookup(struct inode *dir __attribute__((unused)), struct dentry *dentry,
			     unsigned int flags __attribute__((unused)))
{
	if (dentry->d_name.len > NAME_MAX)
		return ERR_PTR(-ENAMETOOLONG);
	d_add(dentry, NULL);
	return NULL;
}

int simple_empty(struct dentry *dentry)
{
	struct dentry *child;
	int ret = 1;

	spin_lock(&dcache_lock);
	list_for_each_entry(child, &dentry->d_subdirs, d_child)
		if (child->d_inode)
			ret = 0;
	spin_unlock(&dcache_lock);
	return ret;
}

static void drop_nlink(struct inode *inode)
{
	__sync_fetch_and_sub(&inode->i_nlink, 1);
}

static void inc_nlink(struct inode *inode)
{
	__sync_fetch_and_add(&inode->i_nlink, 1);
}

int simple_unlink(struct inode *dir, struct dentry *dentry)
{
	struct inode *inode = dentry->d_inode;

	inode->i_ctime = dir->i_ctime = dir->i_mtime = current_time(inode);
	drop_nlink(inode);
	dput(dentry);
	return 0;
}

int simple_rmdir(struct inode *dir, struct dentry *dentry)
{
	if (!simple_empty(dentry))
		return -ENOTEMPTY;
	drop_nlink(dentry->d_inode);
	simple_unlink(dir, dentry);
	drop_nlink(dir);
	return 0;
}

int simple_link(struct dentry *old_dentry, struct inode *dir, struct dentry *dentry)
{
	struct inode *inode = old_dentry->d_inode;

	if (!file_pages_left(1))
		return -ENOSPC;
	inode->i_ctime = dir->i_ctime = dir->i_mtime = current_time(inode);
	inc_nlink(inode);
	ihold(inode);
	dget(dentry);
	d_instantiate(dentry, inode);
	return 0;
}

int simple_rename(struct user_namespace *mnt_userns __attribute__((unused)), struct inode *old_dir,
		  struct dentry *old_dentry, struct inode *new_dir, struct dentry *new_dentry,
		  unsigned int flags)
{
	bool they_are_dirs = S_ISDIR(old_dentry->d_inode->i_mode);

	if (flags & ~RENAME_NOREPLACE)
		return -EINVAL;
	if (!d_is_negative(new_dentry)) {
		if (they_are_dirs && !simple_empty(new_dentry))
			return -ENOTEMPTY;
		simple_unlink(new_dir, new_dentry);
		if (they_are_dirs) {
			drop_nlink(new_dentry->d_inode);
			drop_nlink(old_dir);
		}
	} else if (they_are_dirs) {
		drop_nlink(old_dir);
		inc_nlink(new_dir);
	}
	old_dir->i_ctime = old_dir->i_mtime = new_dir->i_ctime = new_dir->i_mtime =
		old_dentry->d_inode->i_ctime = current_time(old_dir);
	return 0;
}

int simple_setattr(struct user_namespace *mnt_userns, struct dentry *dentry, struct iattr *iattr)
{
	struct inode *inode = dentry->d_inode;
	int error = setattr_prepare(mnt_userns, dentry, iattr);

	if (error)
		return error;
	if (iattr->ia_valid & ATTR_SIZE) {
		inode->i_size = iattr->ia_size;
		truncate_pagecache(inode, iattr->ia_size);
	}
	setattr_copy(mnt_userns, inode, iattr);
	return 0;
}

int simple_getattr(struct user_namespace *mnt_userns, const struct path *path, struct kstat *stat,
		   u32 mask __attribute__((unused)), unsigned int flags __attribute__((unused)))
{
	struct inode *inode = path->dentry->d_inode;

	generic_fillattr(mnt_userns, inode, stat);
	stat->blocks = inode->i_mapping->nrpages << (PAGE_SHIFT - 9);
	return 0;
}

loff_t dcache_dir_lseek(struct file *file, loff_t offset, int whence)
{
	if (whence == SEEK_CUR)
		offset += file->f_pos;
	else if (whence != SEEK_SET)
		return -EINVAL;
	if (offset < 0)
		return -EINVAL;
	file->f_pos = offset;
	return offset;
}

static bool dir_emit(struct dir_context *ctx, const char *name, int namelen, struct inode *inode)
{
	return ctx->actor(ctx, name, namelen, ctx->pos, inode->i_ino,
			  (inode->i_mode & S_IFMT) >> 12);
}

static bool dir_emit_dots(struct file *file, struct dir_context *ctx)
{
	struct dentry *dentry = file->f_path.dentry;

	if (ctx->pos == 0) {
		if (!dir_emit(ctx, ".", 1, dentry->d_inode))
			return false;
		ctx->pos = 1;
	}
	if (ctx->pos == 1) {
		if (!dir_emit(ctx, "..", 2, dentry->d_parent->d_inode))
			return false;
		ctx->pos = 2;
	}
	return true;
}

/* Entries are in the order of their cookies, which are the positions. */
int dcache_readdir(struct file *file, struct dir_context *ctx)
{
	struct dentry *child;

	if (!dir_emit_dots(file, ctx))
		return 0;
	spin_lock(&dcache_lock);
	list_for_each_entry(child, &file->f_path.dentry->d_subdirs, d_child) {
		if (!child->d_inode || (loff_t)child->d_cookie < ctx->pos)
			continue;
		ctx->pos = child->d_cookie;
		if (!dir_emit(ctx, child->d_name.name, child->d_name.len, child->d_inode))
			break;
		ctx->pos = child->d_cookie + 1;
	}
	spin_unlock(&dcache_lock);
	return 0;
}

ssize_t generic_read_dir(struct file *file __attribute__((unused)),
			 char __user *buf __attribute__((unused)),
			 size_t size __attribute__((unused)), loff_t *pos __attribute__((unused)))
{
	return -EISDIR;
}
