// SPDX-License-Identifier: GPL-2.0-or-later
// Working directories: kept by a task, inherited by its children.
#include "errno.h"
#include "fs_struct.h"
#include "mm.h"
#include "printk.h"
#include "syscalls.h"
#include "uaccess.h"

static noinline struct fs_struct *alloc_fs_struct(const struct path *pwd)
{
	struct fs_struct *fs = kzalloc(sizeof(*fs), GFP_KERNEL);

	if (!fs)
		return NULL;
	atomic_set(&fs->users, 1);
	spin_lock_init(&fs->lock);
	fs->pwd = *pwd;
	path_get(&fs->pwd);
	return fs;
}

/* The directory with a reference to it. */
void get_fs_pwd(struct path *pwd)
{
	struct fs_struct *fs = current->fs;

	if (!fs) {
		*pwd = root_path;
		path_get(pwd);
		return;
	}
	spin_lock(&fs->lock);
	*pwd = fs->pwd;
	path_get(pwd);
	spin_unlock(&fs->lock);
}

int set_fs_pwd(const struct path *path)
{
	struct fs_struct *fs = current->fs;
	struct path old;

	if (!fs) {
		current->fs = alloc_fs_struct(path);
		return current->fs ? 0 : -ENOMEM;
	}
	path_get(path);
	spin_lock(&fs->lock);
	old = fs->pwd;
	fs->pwd = *path;
	spin_unlock(&fs->lock);
	path_put(&old);
	return 0;
}

int copy_fs(unsigned long clone_flags, struct task_struct *tsk)
{
	struct fs_struct *fs = current->fs;

	if (!fs)
		return 0;
	if (clone_flags & CLONE_FS) {
		atomic_inc(&fs->users);
		return 0;
	}
	tsk->fs = alloc_fs_struct(&fs->pwd);
	return tsk->fs ? 0 : -ENOMEM;
}

void exit_fs(struct task_struct *tsk)
{
	struct fs_struct *fs = tsk->fs;

	tsk->fs = NULL;
	if (!fs || !atomic_dec_and_test(&fs->users))
		return;
	path_put(&fs->pwd);
	kfree(fs);
}

static int chdir_to(const struct path *path)
{
	int error = inode_permission(&init_user_ns, path->dentry->d_inode, MAY_EXEC);

	return error ? error : set_fs_pwd(path);
}

SYSCALL_DEFINE1(chdir, const char __user *, filename)
{
	struct path path;
	int error = user_path_at(AT_FDCWD, filename, LOOKUP_FOLLOW | LOOKUP_DIRECTORY, &path);

	if (error)
		return error;
	error = chdir_to(&path);
	path_put(&path);
	return error;
}

SYSCALL_DEFINE1(fchdir, unsigned int, fd)
{
	struct fd f = fdget(fd);
	int error = -ENOTDIR;

	if (!f.file)
		return -EBADF;
	if (S_ISDIR(f.file->f_inode->i_mode))
		error = chdir_to(&f.file->f_path);
	fdput(f);
	return error;
}

/* Returns the length with the final NUL. */
SYSCALL_DEFINE2(getcwd, char __user *, buf, unsigned long, size)
{
	char *page = (char *)__get_free_pages(GFP_KERNEL, 0), *name;
	long error = -ERANGE, len;
	struct path pwd;

	if (!page)
		return -ENOMEM;
	get_fs_pwd(&pwd);
	name = d_path(&pwd, page, PAGE_SIZE);
	path_put(&pwd);
	len = IS_ERR(name) ? 0 : page + PAGE_SIZE - name;
	if (IS_ERR(name))
		error = PTR_ERR(name);
	else if ((unsigned long)len <= size)
		error = copy_to_user(buf, name, len) ? -EFAULT : len;
	free_page((unsigned long)page);
	return error;
}
