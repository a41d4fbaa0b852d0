// SPDX-License-Identifier: GPL-2.0-or-later
// ramfs: a file system in memory; /scratch is one.
#include "errno.h"
#include "fs.h"
#include "mm.h"
#include "printk.h"
#include "string.h"

#define RAMFS_MAGIC 0x858458f6

struct super_block ramfs_sb = {
	.s_magic = RAMFS_MAGIC, .s_maxbytes = 1LL << 30, .s_dev = 0x15, .s_mountpoint = "/scratch",
};
struct super_block devtmpfs_sb = {
	.s_magic = RAMFS_MAGIC, .s_maxbytes = 1LL << 30, .s_dev = 0x6, .s_mountpoint = "/dev",
};

static const struct inode_operations ramfs_dir_inode_operations;
static const struct file_operations ramfs_dir_operations;

static int generic_delete_open(struct inode *inode, struct file *filp)
{
	return generic_file_open(inode, filp);
}

static const struct file_operations ramfs_file_operations = {
	.llseek = generic_file_llseek,
	.read_iter = generic_file_read_iter,
	.write_iter = generic_file_write_iter,
	.open = generic_delete_open,
	.fsync = noop_fsync,
};

static const struct inode_operations ramfs_file_inode_operations = {
	.setattr = simple_setattr,
	.getattr = simple_getattr,
};

static const char *simple_get_link(struct dentry *dentry __attribute__((unused)),
				   struct inode *inode)
{
	return inode->i_link;
}

static const struct inode_operations ramfs_symlink_inode_operations = {
	.get_link = simple_get_link,
	.getattr = simple_getattr,
	.setattr = simple_setattr,
};

struct inode *ramfs_get_inode(struct super_block *sb, const struct inode *dir, umode_t mode,
			      dev_t dev)
{
	struct inode *inode = new_inode(sb);

	if (!inode)
		return NULL;
	inode_init_owner(&init_user_ns, inode, dir, mode);
	inode->i_atime = inode->i_mtime = inode->i_ctime = current_time(inode);
	switch (mode & S_IFMT) {
	default:
		inode->i_op = &ramfs_file_inode_operations;
		init_special_inode(inode, mode, dev);
		break;
	case S_IFREG:
		inode->i_op = &ramfs_file_inode_operations;
		inode->i_fop = &ramfs_file_operations;
		break;
	case S_IFDIR:
		inode->i_op = &ramfs_dir_inode_operations;
		inode->i_fop = &ramfs_dir_operations;
		inode->i_nlink = 2;
		break;
	case S_IFLNK:
		inode->i_op = &ramfs_symlink_inode_operations;
		inode->i_fop = &ramfs_file_operations;
		break;
	}
	return inode;
}

/* The entry keeps a reference of its own: it is the only place that knows the file. */
int ramfs_mknod(struct user_namespace *mnt_userns __attribute__((unused)), struct inode *dir,
		struct dentry *dentry, umode_t mode, dev_t dev)
{
	struct inode *inode = NULL;

	if (file_pages_left(1))
		inode = ramfs_get_inode(dir->i_sb, dir, mode, dev);
	if (!inode)
		return -ENOSPC;
	d_instantiate(dentry, inode);
	dget(dentry);
	dir->i_mtime = dir->i_ctime = current_time(dir);
	return 0;
}

static int ramfs_create(struct user_namespace *mnt_userns, struct inode *dir,
			struct dentry *dentry, umode_t mode, bool excl __attribute__((unused)))
{
	return ramfs_mknod(mnt_userns, dir, dentry, mode | S_IFREG, 0);
}

static int ramfs_mkdir(struct user_namespace *mnt_userns, struct inode *dir,
		       struct dentry *dentry, umode_t mode)
{
	int retval = ramfs_mknod(mnt_userns, dir, dentry, mode | S_IFDIR, 0);

	if (!retval)
		dir->i_nlink++;
	return retval;
}

static int ramfs_symlink(struct user_namespace *mnt_userns, struct inode *dir,
			 struct dentry *dentry, const char *symname)
{
	char *link = kstrdup(symname, GFP_KERNEL);
	int error;

	if (!link)
		return -ENOSPC;
	error = ramfs_mknod(mnt_userns, dir, dentry, S_IFLNK | S_IRWXUGO, 0);
	if (error) {
		kfree(link);
		return error;
	}
	dentry->d_inode->i_link = link;
	dentry->d_inode->i_size = (loff_t)strlen(link);
	return 0;
}

static const struct inode_operations ramfs_dir_inode_operations = {
	.lookup = simple_lookup,
	.create = ramfs_create,
	.link = simple_link,
	.unlink = simple_unlink,
	.symlink = ramfs_symlink,
	.mkdir = ramfs_mkdir,
	.mknod = ramfs_mknod,
	.rmdir = simple_rmdir,
	.rename = simple_rename,
	.setattr = simple_setattr,
	.getattr = simple_getattr,
};

static const struct file_operations ramfs_dir_operations = {
	.llseek = dcache_dir_lseek,
	.read = generic_read_dir,
	.iterate_shared = dcache_readdir,
	.fsync = noop_fsync,
};

static __init void ramfs_mount(struct super_block *sb, umode_t mode)
{
	const char *name = sb->s_mountpoint + 1;
	struct qstr qname = { .name = name, .len = (u32)strlen(name) };
	struct dentry *mountpoint = d_alloc(root_path.dentry, &qname);

	sb->s_root = d_make_root(sb, ramfs_get_inode(sb, NULL, S_IFDIR | mode, 0));
	d_add(mountpoint, new_inode(&hostfs_sb));
	mountpoint->d_inode->i_mode = S_IFDIR | 0755;
	mountpoint->d_mounted = sb;
}

/* Everybody may write to /scratch. */
__init void init_ramfs_fs(void)
{
	ramfs_mount(&ramfs_sb, S_ISVTX | S_IRWXUGO);
	ramfs_mount(&devtmpfs_sb, 0755);
}
