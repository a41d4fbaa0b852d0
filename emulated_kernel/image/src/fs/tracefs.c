// SPDX-License-Identifier: GPL-2.0-or-later
// tracefs: directories and files that kernel code makes for itself.
#include "errno.h"
#include "fs.h"
#include "mm.h"
#include "printk.h"
#include "string.h"

#define TRACEFS_MAGIC 0x74726163

struct super_block tracefs_sb = {
	.s_magic = TRACEFS_MAGIC, .s_maxbytes = LLONG_MAX, .s_dev = 0x16,
};

static loff_t default_llseek(struct file *file, loff_t offset, int whence)
{
	return whence == SEEK_END ? -EINVAL : dcache_dir_lseek(file, offset, whence);
}

static const struct inode_operations tracefs_inode_operations = { .lookup = simple_lookup };
static const struct file_operations tracefs_dir_operations = {
	.llseek = default_llseek,
	.read = generic_read_dir,
	.iterate_shared = dcache_readdir,
};

static struct inode *tracefs_get_inode(umode_t mode)
{
	struct inode *inode = new_inode(&tracefs_sb);

	if (!inode)
		return NULL;
	inode->i_mode = mode;
	inode->i_op = &tracefs_inode_operations;
	inode->i_fop = &tracefs_dir_operations;
	inode->i_atime = inode->i_mtime = inode->i_ctime = current_time(inode);
	return inode;
}

/* The parent's lock is held when this returns a dentry. */
static noinline struct dentry *start_creating(const char *name, struct dentry *parent)
{
	struct qstr qname = { .name = name, .len = (u32)strlen(name) };
	struct dentry *dentry;

	if (!parent)
		parent = tracefs_sb.s_root;
	qname.hash = full_name_hash(parent, name, qname.len);
	inode_lock(parent->d_inode);
	dentry = d_lookup(parent, &qname);
	if (dentry) {
		dput(dentry);
		dentry = ERR_PTR(-EEXIST);
	} else {
		dentry = d_alloc(parent, &qname);
		dentry = dentry ? dentry : ERR_PTR(-ENOMEM);
	}
	if (IS_ERR(dentry))
		inode_unlock(parent->d_inode);
	return dentry;
}

static struct dentry *failed_creating(struct dentry *dentry)
{
	inode_unlock(dentry->d_parent->d_inode);
	dput(dentry);
	return NULL;
}

static struct dentry *end_creating(struct dentry *dentry)
{
	inode_unlock(dentry->d_parent->d_inode);
	return dentry;
}

static noinline struct dentry *__create_dir(const char *name, struct dentry *parent)
{
	struct dentry *dentry = start_creating(name, parent);
	struct inode *inode;

	if (IS_ERR(dentry))
		return NULL;
	inode = tracefs_get_inode(S_IFDIR | 0750);
	if (unlikely(!inode))
		return failed_creating(dentry);
	inode->i_nlink = 2;
	d_add(dentry, inode);
	dentry->d_parent->d_inode->i_nlink++;
	return end_creating(dentry);
}

struct dentry *tracefs_create_dir(const char *name, struct dentry *parent)
{
	return __create_dir(name, parent);
}

struct dentry *tracefs_create_file(const char *name, umode_t mode, struct dentry *parent,
				   void *data, const struct file_operations *fops)
{
	struct dentry *dentry = start_creating(name, parent);
	struct inode *inode;

	if (IS_ERR(dentry))
		return NULL;
	inode = tracefs_get_inode(mode & S_IFMT ? mode : mode | S_IFREG);
	if (unlikely(!inode))
		return failed_creating(dentry);
	inode->i_fop = fops ? fops : &tracefs_dir_operations;
	inode->i_private = data;
	d_add(dentry, inode);
	return end_creating(dentry);
}

static void remove_one(struct dentry *dentry)
{
	if (S_ISDIR(dentry->d_inode->i_mode))
		dentry->d_parent->d_inode->i_nlink--;
	d_delete(dentry);
	dput(dentry);
}

/* With all below it; the deepest go first. */
static void remove_tree(struct dentry *dentry)
{
	struct dentry *child, *next;

	list_for_each_entry_safe(child, next, &dentry->d_subdirs, d_child)
		remove_tree(child);
	remove_one(dentry);
}

void tracefs_remove(struct dentry *dentry)
{
	if (IS_ERR_OR_NULL(dentry))
		return;
	remove_tree(dentry);
}

__init void tracefs_init(void)
{
	tracefs_sb.s_root = d_make_root(&tracefs_sb, tracefs_get_inode(S_IFDIR | 0755));
}
