// SPDX-License-Identifier: GPL-2.0-or-later
// Inodes: allocation, references, times, owners.
#include "chrdev.h"
#include "fs.h"
#include "mm.h"
#include "printk.h"
#include "string.h"

struct user_namespace init_user_ns;
static struct kmem_cache *inode_cachep;
void dcache_init(void);
void namei_init(void);

static void init_once(void *foo)
{
	struct inode *inode = foo;

	memset(inode, 0, sizeof(*inode));
	mutex_init(&inode->i_rwsem);
	inode->i_data.host = inode;
}

static void inode_init_always(struct super_block *sb, struct inode *inode)
{
	inode->i_sb = sb;
	inode->i_nlink = 1;
	inode->i_ino = __sync_add_and_fetch(&sb->s_next_ino, 1);
	atomic_set(&inode->i_count, 1);
	inode->i_mapping = &inode->i_data;
}

static noinline struct inode *alloc_inode(struct super_block *sb)
{
	struct inode *inode = kmem_cache_alloc(inode_cachep, GFP_KERNEL);

	if (inode)
		inode_init_always(sb, inode);
	return inode;
}

struct inode *new_inode(struct super_block *sb)
{
	return alloc_inode(sb);
}

void ihold(struct inode *inode)
{
	atomic_inc(&inode->i_count);
}

static noinline void evict(struct inode *inode)
{
	truncate_inode_pages_final(&inode->i_data);
	kfree(inode->i_link);
	kmem_cache_free(inode_cachep, inode);
}

void iput(struct inode *inode)
{
	if (inode && atomic_dec_and_test(&inode->i_count))
		evict(inode);
}

void inode_init_owner(struct user_namespace *mnt_userns __attribute__((unused)),
		      struct inode *inode, const struct inode *dir, umode_t mode)
{
	inode->i_uid = current_cred()->fsuid;
	inode->i_gid = current_cred()->fsgid;
	if (dir && dir->i_mode & S_ISGID) {
		inode->i_gid = dir->i_gid;
		if (S_ISDIR(mode))
			mode |= S_ISGID;
	}
	inode->i_mode = mode;
}

bool inode_owner_or_capable(struct user_namespace *mnt_userns __attribute__((unused)),
			    const struct inode *inode)
{
	uid_t fsuid = current_cred()->fsuid.val;

	return fsuid == inode->i_uid.val || fsuid == 0;
}

struct timespec64 current_time(struct inode *inode __attribute__((unused)))
{
	struct timespec64 now;

	ktime_get_real_ts64(&now);
	return now;
}

void touch_atime(const struct path *path)
{
	struct inode *inode = path->dentry->d_inode;

	inode->i_atime = current_time(inode);
}

int file_update_time(struct file *file)
{
	struct inode *inode = file->f_inode;

	inode->i_mtime = inode->i_ctime = current_time(inode);
	return 0;
}

__init void vfs_caches_init(void)
{
	namei_init();
	dcache_init();
	inode_cachep = kmem_cache_create("inode_cache", sizeof(struct inode), 64, 0, init_once);
	files_init();
	init_hostfs_fs();
	init_ramfs_fs();
	init_pipe_fs();
	chr_dev_init();
}
