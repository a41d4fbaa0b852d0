// SPDX-License-Identifier: GPL-2.0-or-later
// What the host's own path walks ask of the files in memory: no system calls of anybody, so nothing traces them.
#include "errno.h"
#include "fs.h"
#include "host_abi.h"

char host_path[PATH_MAX]; /* the host writes a path into it, from the root, without "." and ".." */
u8 host_reply[HOST_REPLY_SIZE] __aligned(8);

struct dentry *host_d_lookup(const struct dentry *parent, const char *name, unsigned int len);
long host_look_path(void);
long host_look_fd(unsigned int fd);
long host_look_link(void);
long host_look_entries(unsigned long start);

struct host_entry {
	u64 ino;
	u32 cookie; /* where the next call starts, to have what follows */
	u8 type;
	u8 len;
	char name[];
};

/* Links are no directories here: whoever asks has followed them. */
static __always_inline struct dentry *walk_host_path(void)
{
	struct dentry *dentry = root_path.dentry;
	const char *name = host_path;
	unsigned int len;

	for (;;) {
		while (*name == '/')
			name++;
		if (!*name)
			return dentry;
		if (!S_ISDIR(dentry->d_inode->i_mode))
			return ERR_PTR(-ENOTDIR);
		for (len = 0; name[len] && name[len] != '/'; len++)
			;
		if (len > NAME_MAX)
			return ERR_PTR(-ENAMETOOLONG);
		dentry = host_d_lookup(dentry, name, len);
		if (!dentry)
			return ERR_PTR(-ENOENT);
		if (dentry->d_mounted)
			dentry = dentry->d_mounted->s_root;
		name += len;
	}
}

static __always_inline long reply_stat(const struct inode *inode)
{
	struct stat *stat = (struct stat *)host_reply;

	stat->st_dev = inode->i_sb->s_dev;
	stat->st_ino = inode->i_ino;
	stat->st_nlink = inode->i_nlink;
	stat->st_mode = inode->i_mode;
	stat->st_uid = inode->i_uid.val;
	stat->st_gid = inode->i_gid.val;
	stat->st_rdev = inode->i_rdev;
	stat->st_size = inode->i_size;
	stat->st_blksize = PAGE_SIZE;
	stat->st_blocks = inode->i_mapping ? (s64)inode->i_mapping->nrpages << (PAGE_SHIFT - 9) : 0;
	stat->st_atime = (u64)inode->i_atime.tv_sec;
	stat->st_atime_nsec = (u64)inode->i_atime.tv_nsec;
	stat->st_mtime = (u64)inode->i_mtime.tv_sec;
	stat->st_mtime_nsec = (u64)inode->i_mtime.tv_nsec;
	stat->st_ctime = (u64)inode->i_ctime.tv_sec;
	stat->st_ctime_nsec = (u64)inode->i_ctime.tv_nsec;
	return 0;
}

noinstr long host_look_path(void)
{
	struct dentry *dentry = walk_host_path();

	return IS_ERR(dentry) ? PTR_ERR(dentry) : reply_stat(dentry->d_inode);
}

/* Of the table that the host's tasks share. */
noinstr long host_look_fd(unsigned int fd)
{
	struct files_struct *files = child_reaper->files;

	if (!files || fd >= files->max_fds || IS_ERR_OR_NULL(files->fd[fd]))
		return -EBADF;
	return reply_stat(files->fd[fd]->f_inode);
}

noinstr long host_look_link(void)
{
	struct dentry *dentry = walk_host_path();
	const char *link;
	long len;

	if (IS_ERR(dentry))
		return PTR_ERR(dentry);
	link = dentry->d_inode->i_link;
	if (!S_ISLNK(dentry->d_inode->i_mode) || !link)
		return -EINVAL;
	for (len = 0; link[len] && len < HOST_REPLY_SIZE; len++)
		host_reply[len] = (u8)link[len];
	return len;
}

/* Bytes of struct host_entry, 0 at the end; each begins at a multiple of 8. */
noinstr long host_look_entries(unsigned long start)
{
	struct dentry *dir = walk_host_path(), *child;
	struct host_entry *entry;
	unsigned long at = 0, size, i;

	if (IS_ERR(dir))
		return PTR_ERR(dir);
	if (!S_ISDIR(dir->d_inode->i_mode))
		return -ENOTDIR;
	list_for_each_entry(child, &dir->d_subdirs, d_child) {
		if (!child->d_inode || child->d_cookie < start)
			continue;
		size = ALIGN(sizeof(*entry) + child->d_name.len, 8);
		if (at + size > HOST_REPLY_SIZE)
			break;
		entry = (struct host_entry *)(host_reply + at);
		entry->ino = child->d_inode->i_ino;
		entry->cookie = (u32)child->d_cookie + 1;
		entry->type = (u8)((child->d_inode->i_mode & S_IFMT) >> 12);
		entry->len = (u8)child->d_name.len;
		for (i = 0; i < child->d_name.len; i++)
			entry->name[i] = child->d_name.name[i];
		at += size;
	}
	return (long)at;
}
