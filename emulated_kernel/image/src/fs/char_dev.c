// SPDX-License-Identifier: GPL-2.0-or-later
// Character devices: a node in the tree becomes its driver's file when it is opened.
#include "chrdev.h"
#include "errno.h"
#include "fs.h"

#define CHRDEV_MAJORS 16

static const struct file_operations *chrdevs[CHRDEV_MAJORS];

int register_chrdev(unsigned int major, const char *name __attribute__((unused)),
		    const struct file_operations *fops)
{
	if (major >= CHRDEV_MAJORS)
		return -EINVAL;
	if (chrdevs[major])
		return -EBUSY;
	chrdevs[major] = fops;
	return 0;
}

static int chrdev_open(struct inode *inode, struct file *filp)
{
	unsigned int major = MAJOR(inode->i_rdev);
	const struct file_operations *fops = major < CHRDEV_MAJORS ? chrdevs[major] : NULL;

	if (!fops)
		return -ENXIO;
	filp->f_op = fops;
	return fops->open ? fops->open(inode, filp) : 0;
}

static const struct file_operations def_chr_fops = { .open = chrdev_open };

void init_special_inode(struct inode *inode, umode_t mode, dev_t rdev)
{
	inode->i_mode = mode;
	if (!S_ISCHR(mode))
		return;
	inode->i_fop = &def_chr_fops;
	inode->i_rdev = rdev;
}
