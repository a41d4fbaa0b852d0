// SPDX-License-Identifier: GPL-2.0-or-later
// hostfs: every path outside /scratch; what its files do, the host does.
#include "errno.h"
#include "freezer.h"
#include "fs.h"
#include "host_abi.h"
#include "internal.h"
#include "mm.h"
#include "printk.h"
#include "string.h"

struct super_block hostfs_sb = { .s_magic = 0x00c0ffee, .s_maxbytes = LLONG_MAX, .s_dev = 0x14 };

static const struct inode_operations hostfs_inode_operations;
static const struct inode_operations hostfs_dir_inode_operations;
static const struct file_operations hostfs_file_operations;
static const struct file_operations tracing_mark_fops;
static const struct file_operations tracing_mark_raw_fops;

static bool is_below(const char *name, const char *directory)
{
	size_t len = strlen(directory);

	return !strncmp(name, directory, len) && (!name[len] || name[len] == '/');
}

/* name is a path from the root, without the first slash. */
bool is_hostfs_path(const char *name)
{
	if (name[0] == '.' && (name[1] == '/' || !name[1] || name[1] == '.'))
		return false;
	return !is_below(name, ramfs_sb.s_mountpoint + 1) && !is_below(name, devtmpfs_sb.s_mountpoint + 1);
}

/* Asks the host; where it has nothing to give yet, the task sleeps and asks again. */
static noinline long hostfs_call(unsigned long op, u64 file, unsigned long buf, unsigned long count)
{
	long ret;

	for (;;) {
		ret = host_hypercall(HYPERCALL_HOSTFS, op, file, buf, count);
		if (ret != -ERESTARTSYS)
			return ret;
		do {
			set_current_state(TASK_INTERRUPTIBLE);
			schedule();
		} while (try_to_freeze());
	}
}
NOKPROBE_SYMBOL(hostfs_call);

struct hostfs_handle {
	u64 id;
};

static u64 hostfs_file_id(const struct file *file)
{
	return ((const struct hostfs_handle *)file->private_data)->id;
}

static int hostfs_open(struct inode *inode __attribute__((unused)), struct file *file)
{
	struct hostfs_handle *handle = kmalloc(sizeof(*handle), GFP_KERNEL);
	int ret;

	if (!handle)
		return -ENOMEM;
	handle->id = current->host_file;
	/* The position is the host's: a reader that sleeps must not keep others from the file. */
	file->f_mode &= ~FMODE_ATOMIC_POS;
	ret = (int)hostfs_call(HOSTFS_OPEN, handle->id, file->f_flags, 0);
	if (ret < 0) {
		kfree(handle);
		return ret;
	}
	file->private_data = handle;
	if (ret == HOSTFS_TRACING_MARK)
		file->f_op = &tracing_mark_fops;
	else if (ret == HOSTFS_TRACING_MARK_RAW)
		file->f_op = &tracing_mark_raw_fops;
	return 0;
}

static ssize_t hostfs_read(struct file *file, char __user *buf, size_t count, loff_t *pos)
{
	ssize_t ret = hostfs_call(HOSTFS_READ, hostfs_file_id(file), (unsigned long)buf, count);

	if (ret > 0)
		*pos += ret;
	return ret;
}

static ssize_t hostfs_write(struct file *file, const char __user *buf, size_t count, loff_t *pos)
{
	ssize_t ret = hostfs_call(HOSTFS_WRITE, hostfs_file_id(file), (unsigned long)buf, count);

	if (ret > 0)
		*pos += ret;
	return ret;
}

/* The host writes the record, which has the address of this function. */
static noinline ssize_t tracing_mark_write(struct file *file, const char __user *buf, size_t count,
					   loff_t *pos)
{
	return hostfs_write(file, buf, count, pos);
}

static noinline ssize_t tracing_mark_raw_write(struct file *file, const char __user *buf, size_t count,
					       loff_t *pos)
{
	return hostfs_write(file, buf, count, pos);
}

/* The host closes only what it has forgotten already: it needn't be told. */
static int hostfs_release(struct inode *inode __attribute__((unused)), struct file *file)
{
	kfree(file->private_data);
	return 0;
}

static loff_t default_llseek(struct file *file, loff_t offset, int whence)
{
	return dcache_dir_lseek(file, offset, whence);
}

/* The host lists its directories itself. */
static int hostfs_readdir(struct file *file __attribute__((unused)),
			  struct dir_context *ctx __attribute__((unused)))
{
	return 0;
}

static struct inode *hostfs_iget(umode_t mode)
{
	struct inode *inode = new_inode(&hostfs_sb);

	if (!inode)
		return NULL;
	inode->i_mode = mode;
	inode->i_fop = &hostfs_file_operations;
	inode->i_op = S_ISDIR(mode) ? &hostfs_dir_inode_operations : &hostfs_inode_operations;
	return inode;
}

static bool is_missing(unsigned int flags)
{
	if (current->host_lookup == HOST_LOOKUP_DEFAULT)
		return flags & (LOOKUP_EXCL | LOOKUP_RENAME_TARGET);
	return current->host_lookup == HOST_LOOKUP_MISSING;
}

/* The host has looked for the name already. */
static struct dentry *hostfs_lookup(struct inode *dir __attribute__((unused)),
				    struct dentry *dentry, unsigned int flags)
{
	struct inode *inode;

	if (is_missing(flags)) {
		d_add(dentry, NULL);
		return NULL;
	}
	inode = hostfs_iget(flags & LOOKUP_DIRECTORY ? S_IFDIR | 0777 : S_IFREG | 0666);
	if (!inode)
		return ERR_PTR(-ENOMEM);
	d_add(dentry, inode);
	return NULL;
}

static int hostfs_mkdir(struct user_namespace *mnt_userns __attribute__((unused)),
			struct inode *dir __attribute__((unused)),
			struct dentry *dentry __attribute__((unused)), umode_t mode)
{
	return (int)hostfs_call(HOSTFS_MKDIR, current->host_file, mode, 0);
}

static int hostfs_rmdir(struct inode *dir __attribute__((unused)),
			struct dentry *dentry __attribute__((unused)))
{
	return (int)hostfs_call(HOSTFS_RMDIR, current->host_file, 0, 0);
}

static int hostfs_setattr(struct user_namespace *mnt_userns __attribute__((unused)),
			  struct dentry *dentry __attribute__((unused)),
			  struct iattr *attr __attribute__((unused)))
{
	return 0;
}

static const struct inode_operations hostfs_inode_operations = { .setattr = hostfs_setattr };

static const struct inode_operations hostfs_dir_inode_operations = {
	.lookup = hostfs_lookup,
	.mkdir = hostfs_mkdir,
	.rmdir = hostfs_rmdir,
	.setattr = hostfs_setattr,
};

static const struct file_operations hostfs_file_operations = {
	.llseek = default_llseek,
	.read = hostfs_read,
	.write = hostfs_write,
	.open = hostfs_open,
	.release = hostfs_release,
	.iterate_shared = hostfs_readdir,
	.fsync = noop_fsync,
};

static const struct file_operations tracing_mark_fops = {
	.llseek = default_llseek,
	.read = hostfs_read,
	.write = tracing_mark_write,
	.open = hostfs_open,
	.release = hostfs_release,
	.fsync = noop_fsync,
};

static const struct file_operations tracing_mark_raw_fops = {
	.llseek = default_llseek,
	.read = hostfs_read,
	.write = tracing_mark_raw_write,
	.open = hostfs_open,
	.release = hostfs_release,
	.fsync = noop_fsync,
};

__init void init_hostfs_fs(void)
{
	hostfs_sb.s_root = d_make_root(&hostfs_sb, hostfs_iget(S_IFDIR | 0777));
	root_path.mnt = &hostfs_sb;
	root_path.dentry = hostfs_sb.s_root;
}
