// SPDX-License-Identifier: GPL-2.0-or-later
// /dev/null, /dev/zero and /dev/full, in a file system of their own.
#include "chrdev.h"
#include "errno.h"
#include "fs.h"
#include "printk.h"
#include "string.h"

static ssize_t read_null(struct file *file, char __user *buf, size_t count, loff_t *ppos)
{
	(void)file, (void)buf, (void)count, (void)ppos;
	return 0;
}

static ssize_t write_null(struct file *file, const char __user *buf, size_t count, loff_t *ppos)
{
	(void)file, (void)buf, (void)ppos;
	return (ssize_t)count;
}

static ssize_t write_iter_null(struct kiocb *iocb __attribute__((unused)), struct iov_iter *from)
{
	size_t count = from->count;

	from->count = 0;
	return (ssize_t)count;
}

static ssize_t read_iter_zero(struct kiocb *iocb, struct iov_iter *iter)
{
	size_t written = 0, chunk, n;

	while (iter->count) {
		chunk = min(iter->count, (size_t)PAGE_SIZE);
		n = iov_iter_zero(chunk, iter);
		written += n;
		if (n < chunk)
			return written ? (ssize_t)written : -EFAULT;
		if (iocb->ki_filp->f_flags & O_NONBLOCK)
			break;
		cond_resched();
	}
	return (ssize_t)written;
}

static ssize_t write_full(struct file *file, const char __user *buf, size_t count, loff_t *ppos)
{
	(void)file, (void)buf, (void)count, (void)ppos;
	return -ENOSPC;
}

static loff_t null_lseek(struct file *file, loff_t offset, int orig)
{
	(void)offset, (void)orig;
	return file->f_pos = 0;
}

static const struct file_operations null_fops = {
	.llseek = null_lseek,
	.read = read_null,
	.write = write_null,
	.write_iter = write_iter_null,
};

static const struct file_operations zero_fops = {
	.llseek = null_lseek,
	.read_iter = read_iter_zero,
	.write = write_null,
	.write_iter = write_iter_null,
};

static const struct file_operations full_fops = {
	.llseek = null_lseek,
	.read_iter = read_iter_zero,
	.write = write_full,
};

static const struct memdev {
	const char *name;
	unsigned int minor;
	const struct file_operations *fops;
} devlist[] = {
	{ "null", 3, &null_fops },
	{ "zero", 5, &zero_fops },
	{ "full", 7, &full_fops },
};

static int memory_open(struct inode *inode, struct file *filp)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(devlist); i++)
		if (devlist[i].minor == MINOR(inode->i_rdev)) {
			filp->f_op = devlist[i].fops;
			return 0;
		}
	return -ENXIO;
}

static const struct file_operations memory_fops = { .open = memory_open };

static __init void devtmpfs_create_node(const struct memdev *dev)
{
	struct dentry *root = devtmpfs_sb.s_root;
	struct qstr name = { .name = dev->name, .len = (u32)strlen(dev->name) };
	struct dentry *dentry = d_alloc(root, &name);

	if (!dentry || ramfs_mknod(&init_user_ns, root->d_inode, dentry, S_IFCHR | 0666,
				   MKDEV(MEM_MAJOR, dev->minor)))
		panic("devtmpfs: no memory for %s", dev->name);
	d_add(dentry, dentry->d_inode);
}

__init void chr_dev_init(void)
{
	unsigned int i;

	register_chrdev(MEM_MAJOR, "mem", &memory_fops);
	for (i = 0; i < ARRAY_SIZE(devlist); i++)
		devtmpfs_create_node(&devlist[i]);
}
