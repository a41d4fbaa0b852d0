// SPDX-License-Identifier: GPL-2.0-or-later
// Opening and closing files, truncation, modes and owners.
#include "errno.h"
#include "fs.h"
#include "printk.h"
#include "syscalls.h"
#include "uaccess.h"

#define VALID_OPEN_FLAGS                                                                   \
	(O_ACCMODE | O_CREAT | O_EXCL | O_TRUNC | O_APPEND | O_NONBLOCK | O_DIRECTORY |    \
	 O_NOFOLLOW | O_CLOEXEC | O_PATH | 01000000 | 0100000 | 04010000 | 0400 | 020000)

int do_truncate(struct user_namespace *mnt_userns, struct dentry *dentry, loff_t length,
		unsigned int time_attrs, struct file *filp)
{
	struct iattr newattrs = { .ia_size = length, .ia_valid = ATTR_SIZE | time_attrs };
	int ret;

	if (length < 0)
		return -EINVAL;
	if (filp) {
		newattrs.ia_file = filp;
		newattrs.ia_valid |= ATTR_FILE;
	}
	inode_lock(dentry->d_inode);
	ret = notify_change(mnt_userns, dentry, &newattrs, NULL);
	inode_unlock(dentry->d_inode);
	return ret;
}

long vfs_truncate(const struct path *path, loff_t length)
{
	struct inode *inode = path->dentry->d_inode;
	long error;

	if (S_ISDIR(inode->i_mode))
		return -EISDIR;
	if (!S_ISREG(inode->i_mode))
		return -EINVAL;
	error = inode_permission(&init_user_ns, inode, MAY_WRITE);
	if (error)
		return error;
	return do_truncate(&init_user_ns, path->dentry, length, 0, NULL);
}

long do_sys_truncate(const char __user *pathname, loff_t length)
{
	struct path path;
	long error;

	if (length < 0)
		return -EINVAL;
	error = user_path_at(AT_FDCWD, pathname, LOOKUP_FOLLOW, &path);
	if (error)
		return error;
	error = vfs_truncate(&path, length);
	path_put(&path);
	return error;
}

long do_sys_ftruncate(unsigned int fd, loff_t length)
{
	struct fd f = fdget(fd);
	long error = -EINVAL;

	if (!f.file)
		return -EBADF;
	if (length >= 0 && S_ISREG(f.file->f_inode->i_mode) && f.file->f_mode & FMODE_WRITE)
		error = do_truncate(&init_user_ns, f.file->f_path.dentry, length,
				    ATTR_MTIME | ATTR_CTIME, f.file);
	fdput(f);
	return error;
}

int chmod_common(const struct path *path, umode_t mode)
{
	struct inode *inode = path->dentry->d_inode;
	struct iattr newattrs;
	int error;

	inode_lock(inode);
	newattrs.ia_mode = (mode & S_IALLUGO) | (inode->i_mode & ~S_IALLUGO);
	newattrs.ia_valid = ATTR_MODE | ATTR_CTIME;
	error = notify_change(&init_user_ns, path->dentry, &newattrs, NULL);
	inode_unlock(inode);
	return error;
}

int chown_common(const struct path *path, uid_t user, gid_t group)
{
	struct inode *inode = path->dentry->d_inode;
	struct iattr newattrs = { .ia_valid = ATTR_CTIME };
	int error;

	if (user != (uid_t)-1) {
		newattrs.ia_valid |= ATTR_UID;
		newattrs.ia_uid = KUIDT_INIT(user);
	}
	if (group != (gid_t)-1) {
		newattrs.ia_valid |= ATTR_GID;
		newattrs.ia_gid = KGIDT_INIT(group);
	}
	inode_lock(inode);
	error = notify_change(&init_user_ns, path->dentry, &newattrs, NULL);
	inode_unlock(inode);
	return error;
}

static noinline int do_fchmodat(int dfd, const char __user *filename, umode_t mode)
{
	struct path path;
	int error = user_path_at(dfd, filename, LOOKUP_FOLLOW, &path);

	if (error)
		return error;
	error = chmod_common(&path, mode);
	path_put(&path);
	return error;
}

static noinline int do_fchownat(int dfd, const char __user *filename, uid_t user, gid_t group,
		       unsigned int flags)
{
	struct path path;
	int error = user_path_at(dfd, filename, flags, &path);

	if (error)
		return error;
	error = chown_common(&path, user, group);
	path_put(&path);
	return error;
}

static noinline long do_faccessat(int dfd, const char __user *filename, int mode, int flags)
{
	struct path path;
	long res;

	if (mode & ~7 || flags & ~(AT_EACCESS | AT_SYMLINK_NOFOLLOW | AT_EMPTY_PATH))
		return -EINVAL;
	res = user_path_at(dfd, filename, flags & AT_SYMLINK_NOFOLLOW ? 0 : LOOKUP_FOLLOW, &path);
	if (res)
		return res;
	res = inode_permission(&init_user_ns, path.dentry->d_inode, mode);
	path_put(&path);
	return res;
}

int generic_file_open(struct inode *inode __attribute__((unused)),
		      struct file *filp __attribute__((unused)))
{
	return 0;
}

static void set_file_modes(struct file *f)
{
	if (f->f_mode & FMODE_READ && (f->f_op->read || f->f_op->read_iter))
		f->f_mode |= FMODE_CAN_READ;
	if (f->f_mode & FMODE_WRITE && (f->f_op->write || f->f_op->write_iter))
		f->f_mode |= FMODE_CAN_WRITE;
	if (f->f_op->llseek)
		f->f_mode |= FMODE_LSEEK;
}

static noinline __noclone int do_dentry_open(struct file *f, struct inode *inode,
					     int (*open)(struct inode *, struct file *))
{
	int error = 0;

	path_get(&f->f_path);
	f->f_inode = inode;
	f->f_mapping = inode->i_mapping;
	f->f_op = inode->i_fop;
	f->f_mode |= FMODE_LSEEK | FMODE_PREAD | FMODE_PWRITE | FMODE_ATOMIC_POS;
	if (!open)
		open = f->f_op->open;
	if (open)
		error = open(inode, f);
	if (error) {
		path_put(&f->f_path);
		f->f_path.dentry = NULL;
		f->f_inode = NULL;
		return error;
	}
	f->f_mode |= FMODE_OPENED;
	set_file_modes(f);
	f->f_flags &= ~(O_CREAT | O_EXCL | O_TRUNC);
	return 0;
}

int vfs_open(const struct path *path, struct file *file)
{
	file->f_path = *path;
	return do_dentry_open(file, path->dentry->d_inode, NULL);
}

static struct open_how build_open_how(int flags, umode_t mode)
{
	struct open_how how = {
		.flags = flags & VALID_OPEN_FLAGS,
		.mode = mode & S_IALLUGO,
	};

	if (!(how.flags & O_CREAT))
		how.mode = 0;
	return how;
}

static int build_open_flags(const struct open_how *how, struct open_flags *op)
{
	int flags = (int)how->flags;

	if (how->flags & ~(u64)VALID_OPEN_FLAGS || how->resolve)
		return -EINVAL;
	if (how->mode && !(flags & O_CREAT))
		return -EINVAL;
	op->open_flag = flags;
	op->mode = (umode_t)how->mode | S_IFREG;
	op->acc_mode = "\004\002\006\006"[flags & O_ACCMODE];
	if (flags & O_TRUNC)
		op->acc_mode |= MAY_WRITE;
	if (flags & O_APPEND)
		op->acc_mode |= MAY_APPEND;
	op->intent = LOOKUP_OPEN;
	op->lookup_flags = flags & O_DIRECTORY ? LOOKUP_DIRECTORY : 0;
	if (!(flags & O_NOFOLLOW) && (flags & (O_CREAT | O_EXCL)) != (O_CREAT | O_EXCL))
		op->lookup_flags |= LOOKUP_FOLLOW;
	return 0;
}

long do_sys_openat2(int dfd, const char __user *filename, struct open_how *how)
{
	struct open_flags op;
	int fd = build_open_flags(how, &op);
	struct filename *tmp;
	struct file *f;

	if (fd)
		return fd;
	tmp = getname(filename);
	if (IS_ERR(tmp))
		return PTR_ERR(tmp);
	fd = get_unused_fd_flags((unsigned int)how->flags);
	if (fd >= 0) {
		f = do_filp_open(dfd, tmp, &op);
		if (IS_ERR(f)) {
			put_unused_fd(fd);
			fd = (int)PTR_ERR(f);
		} else {
			fd_install(fd, f);
		}
	}
	putname(tmp);
	return fd;
}

struct file *filp_open(const char *filename, int flags, umode_t mode)
{
	struct open_how how = build_open_how(flags, mode);
	struct filename *name;
	struct open_flags op;
	struct file *file;
	int error = build_open_flags(&how, &op);

	if (error)
		return ERR_PTR(error);
	name = getname_kernel(filename);
	if (IS_ERR(name))
		return ERR_CAST(name);
	file = do_filp_open(AT_FDCWD, name, &op);
	putname(name);
	return file;
}

noinline long do_sys_open(int dfd, const char __user *filename, int flags, umode_t mode)
{
	struct open_how how = build_open_how(flags, mode);

	return do_sys_openat2(dfd, filename, &how);
}

int filp_close(struct file *filp, void *id)
{
	int retval = 0;

	if (filp->f_op->flush)
		retval = filp->f_op->flush(filp, id);
	fput(filp);
	return retval;
}

SYSCALL_DEFINE3(open, const char __user *, filename, int, flags, umode_t, mode)
{
	return do_sys_open(AT_FDCWD, filename, flags, mode);
}

SYSCALL_DEFINE4(openat, int, dfd, const char __user *, filename, int, flags, umode_t, mode)
{
	return do_sys_open(dfd, filename, flags, mode);
}

SYSCALL_DEFINE4(openat2, int, dfd, const char __user *, filename, struct open_how __user *, how, size_t, usize)
{
	struct open_how tmp;

	if (usize != sizeof(tmp))
		return -EINVAL;
	if (copy_from_user(&tmp, how, sizeof(tmp)))
		return -EFAULT;
	return do_sys_openat2(dfd, filename, &tmp);
}

SYSCALL_DEFINE2(creat, const char __user *, pathname, umode_t, mode)
{
	return do_sys_open(AT_FDCWD, pathname, O_CREAT | O_WRONLY | O_TRUNC, mode);
}

SYSCALL_DEFINE1(close, unsigned int, fd)
{
	return close_fd(fd);
}

SYSCALL_DEFINE2(truncate, const char __user *, path, long, length)
{
	return do_sys_truncate(path, length);
}

SYSCALL_DEFINE2(ftruncate, unsigned int, fd, off_t, length)
{
	return do_sys_ftruncate(fd, length);
}

SYSCALL_DEFINE2(chmod, const char __user *, filename, umode_t, mode)
{
	return do_fchmodat(AT_FDCWD, filename, mode);
}

SYSCALL_DEFINE3(fchmodat, int, dfd, const char __user *, filename, umode_t, mode)
{
	return do_fchmodat(dfd, filename, mode);
}

SYSCALL_DEFINE2(fchmod, unsigned int, fd, umode_t, mode)
{
	struct fd f = fdget(fd);
	int err = -EBADF;

	if (f.file)
		err = chmod_common(&f.file->f_path, mode);
	fdput(f);
	return err;
}

SYSCALL_DEFINE3(chown, const char __user *, filename, uid_t, user, gid_t, group)
{
	return do_fchownat(AT_FDCWD, filename, user, group, LOOKUP_FOLLOW);
}

SYSCALL_DEFINE3(lchown, const char __user *, filename, uid_t, user, gid_t, group)
{
	return do_fchownat(AT_FDCWD, filename, user, group, 0);
}

SYSCALL_DEFINE5(fchownat, int, dfd, const char __user *, filename, uid_t, user, gid_t, group, int, flag)
{
	if (flag & ~AT_SYMLINK_NOFOLLOW)
		return -EINVAL;
	return do_fchownat(dfd, filename, user, group, flag & AT_SYMLINK_NOFOLLOW ? 0 : LOOKUP_FOLLOW);
}

SYSCALL_DEFINE3(fchown, unsigned int, fd, uid_t, user, gid_t, group)
{
	struct fd f = fdget(fd);
	int err = -EBADF;

	if (f.file)
		err = chown_common(&f.file->f_path, user, group);
	fdput(f);
	return err;
}

SYSCALL_DEFINE2(access, const char __user *, filename, int, mode)
{
	return do_faccessat(AT_FDCWD, filename, mode, 0);
}

SYSCALL_DEFINE3(faccessat, int, dfd, const char __user *, filename, int, mode)
{
	return do_faccessat(dfd, filename, mode, 0);
}

SYSCALL_DEFINE4(faccessat2, int, dfd, const char __user *, filename, int, mode, int, flags)
{
	return do_faccessat(dfd, filename, mode, flags);
}
