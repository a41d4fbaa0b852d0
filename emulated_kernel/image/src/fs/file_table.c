// SPDX-License-Identifier: GPL-2.0-or-later
// Open files: their birth and their end.
#include "errno.h"
#include "fs.h"
#include "mm.h"
#include "printk.h"
#include "string.h"

static struct kmem_cache *filp_cachep;
void fdtable_init(void);

static void init_once(void *foo)
{
	struct file *f = foo;

	memset(f, 0, sizeof(*f));
	mutex_init(&f->f_pos_lock);
}

static noinline struct file *__alloc_file(int flags,
					   const struct cred *cred __attribute__((unused)))
{
	struct file *f = kmem_cache_alloc(filp_cachep, GFP_KERNEL);

	if (unlikely(!f))
		return ERR_PTR(-ENOMEM);
	atomic_set(&f->f_count, 1);
	f->f_flags = flags;
	f->f_mode = OPEN_FMODE(flags);
	return f;
}

struct file *alloc_empty_file(int flags, const struct cred *cred)
{
	return __alloc_file(flags, cred);
}

/* An open file without a name. Takes over the reference to the inode, unless it fails. */
struct file *alloc_file_pseudo(struct inode *inode, struct super_block *sb, int flags,
			       const struct file_operations *fops)
{
	static const struct qstr name = { .name = "", .len = 0 };
	struct dentry *dentry = d_alloc_pseudo(sb, &name);
	struct file *file;

	if (!dentry)
		return ERR_PTR(-ENOMEM);
	file = alloc_empty_file(flags, NULL);
	if (IS_ERR(file)) {
		dput(dentry);
		return file;
	}
	d_instantiate(dentry, inode);
	file->f_path = (struct path){ sb, dentry };
	file->f_inode = inode;
	file->f_mapping = inode->i_mapping;
	file->f_op = fops;
	file->f_mode |= FMODE_OPENED;
	if (file->f_mode & FMODE_READ)
		file->f_mode |= FMODE_CAN_READ;
	if (file->f_mode & FMODE_WRITE)
		file->f_mode |= FMODE_CAN_WRITE;
	return file;
}

/* Another open file of the same inode. */
struct file *alloc_file_clone(struct file *base, int flags, const struct file_operations *fops)
{
	struct file *file;

	ihold(base->f_inode);
	file = alloc_file_pseudo(base->f_inode, base->f_path.mnt, flags, fops);
	if (IS_ERR(file))
		iput(base->f_inode);
	return file;
}

struct file *get_file(struct file *f)
{
	atomic_inc(&f->f_count);
	return f;
}

static noinline void file_free(struct file *f)
{
	kmem_cache_free(filp_cachep, f);
}

void __fput(struct file *file)
{
	if (file->f_mode & FMODE_OPENED) {
		if (file->f_op->release)
			file->f_op->release(file->f_inode, file);
		path_put(&file->f_path);
	}
	file_free(file);
}

void fput(struct file *file)
{
	if (atomic_dec_and_test(&file->f_count))
		__fput(file);
}

__init void files_init(void)
{
	filp_cachep = kmem_cache_create("filp", sizeof(struct file), 64, 0, init_once);
	fdtable_init();
}
