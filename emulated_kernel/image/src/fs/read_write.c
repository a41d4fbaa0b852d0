// SPDX-License-Identifier: GPL-2.0-or-later
// Reading, writing and seeking in open files.
#include "errno.h"
#include "fs.h"
#include "printk.h"
#include "syscalls.h"
#include "uaccess.h"

loff_t generic_file_llseek(struct file *file, loff_t offset, int whence)
{
	struct inode *inode = file->f_mapping->host;

	switch (whence) {
	case SEEK_SET:
		break;
	case SEEK_CUR:
		offset += file->f_pos;
		break;
	case SEEK_END:
		offset += i_size_read(inode);
		break;
	default:
		return -EINVAL;
	}
	if (offset < 0 || offset > inode->i_sb->s_maxbytes)
		return -EINVAL;
	file->f_pos = offset;
	return offset;
}

loff_t vfs_llseek(struct file *file, loff_t offset, int whence)
{
	if (!(file->f_mode & FMODE_LSEEK) || !file->f_op->llseek)
		return -ESPIPE;
	return file->f_op->llseek(file, offset, whence);
}

int rw_verify_area(int read_write __attribute__((unused)),
		   struct file *file __attribute__((unused)), const loff_t *ppos, size_t count)
{
	if (unlikely((ssize_t)count < 0))
		return -EINVAL;
	if (ppos && *ppos < 0)
		return -EINVAL;
	return 0;
}

static noinline ssize_t new_sync_read(struct file *filp, char __user *buf, size_t len, loff_t *ppos)
{
	struct kiocb kiocb = { .ki_filp = filp, .ki_pos = ppos ? *ppos : 0 };
	struct iov_iter iter;
	ssize_t ret;

	iov_iter_ubuf(&iter, false, buf, len);
	ret = filp->f_op->read_iter(&kiocb, &iter);
	if (ppos)
		*ppos = kiocb.ki_pos;
	return ret;
}

static noinline ssize_t new_sync_write(struct file *filp, const char __user *buf, size_t len,
				       loff_t *ppos)
{
	struct kiocb kiocb = { .ki_filp = filp, .ki_pos = ppos ? *ppos : 0 };
	struct iov_iter iter;
	ssize_t ret;

	iov_iter_ubuf(&iter, true, (void __user *)buf, len);
	ret = filp->f_op->write_iter(&kiocb, &iter);
	if (ret > 0 && ppos)
		*ppos = kiocb.ki_pos;
	return ret;
}

ssize_t kernel_read(struct file *file, void *buf, size_t count, loff_t *pos)
{
	struct kiocb kiocb = { .ki_filp = file, .ki_pos = pos ? *pos : 0 };
	struct iov_iter iter;
	ssize_t ret;

	if (!file->f_op->read_iter || !(file->f_mode & FMODE_READ))
		return -EINVAL;
	iov_iter_kbuf(&iter, false, buf, count);
	ret = file->f_op->read_iter(&kiocb, &iter);
	if (pos)
		*pos = kiocb.ki_pos;
	return ret;
}

ssize_t kernel_write(struct file *file, const void *buf, size_t count, loff_t *pos)
{
	struct kiocb kiocb = { .ki_filp = file, .ki_pos = pos ? *pos : 0 };
	struct iov_iter iter;
	ssize_t ret;

	if (!file->f_op->write_iter || !(file->f_mode & FMODE_WRITE))
		return -EINVAL;
	iov_iter_kbuf(&iter, true, (void *)buf, count);
	ret = file->f_op->write_iter(&kiocb, &iter);
	if (ret > 0 && pos)
		*pos = kiocb.ki_pos;
	return ret;
}

ssize_t vfs_read(struct file *file, char __user *buf, size_t count, loff_t *pos)
{
	ssize_t ret;

	if (!(file->f_mode & FMODE_READ))
		return -EBADF;
	if (!(file->f_mode & FMODE_CAN_READ))
		return -EINVAL;
	if (unlikely(!access_ok(buf, count)))
		return -EFAULT;
	ret = rw_verify_area(0, file, pos, count);
	if (ret)
		return ret;
	count = min(count, MAX_RW_COUNT);
	if (file->f_op->read)
		return file->f_op->read(file, buf, count, pos);
	return new_sync_read(file, buf, count, pos);
}

ssize_t vfs_write(struct file *file, const char __user *buf, size_t count, loff_t *pos)
{
	ssize_t ret;

	if (!(file->f_mode & FMODE_WRITE))
		return -EBADF;
	if (!(file->f_mode & FMODE_CAN_WRITE))
		return -EINVAL;
	if (unlikely(!access_ok(buf, count)))
		return -EFAULT;
	ret = rw_verify_area(1, file, pos, count);
	if (ret)
		return ret;
	count = min(count, MAX_RW_COUNT);
	if (file->f_op->write)
		return file->f_op->write(file, buf, count, pos);
	return new_sync_write(file, buf, count, pos);
}

/* Readers and writers of one open file take turns; its position is theirs meanwhile. */
static struct fd fdget_pos(unsigned int fd)
{
	struct fd f = { (struct file *)__fdget_pos(fd), 0 };

	return f;
}

static void fdput_pos(struct fd f)
{
	if (f.file->f_mode & FMODE_ATOMIC_POS)
		mutex_unlock(&f.file->f_pos_lock);
	fdput(f);
}

ssize_t ksys_read(unsigned int fd, char __user *buf, size_t count)
{
	struct fd f = fdget_pos(fd);
	ssize_t ret = -EBADF;
	loff_t pos;

	if (f.file) {
		pos = f.file->f_pos;
		ret = vfs_read(f.file, buf, count, &pos);
		if (ret >= 0)
			f.file->f_pos = pos;
		fdput_pos(f);
	}
	return ret;
}

ssize_t ksys_write(unsigned int fd, const char __user *buf, size_t count)
{
	struct fd f = fdget_pos(fd);
	ssize_t ret = -EBADF;
	loff_t pos;

	if (f.file) {
		pos = f.file->f_pos;
		ret = vfs_write(f.file, buf, count, &pos);
		if (ret >= 0)
			f.file->f_pos = pos;
		fdput_pos(f);
	}
	return ret;
}

ssize_t ksys_pread64(unsigned int fd, char __user *buf, size_t count, loff_t pos)
{
	struct fd f;
	ssize_t ret = -EBADF;

	if (pos < 0)
		return -EINVAL;
	f = fdget(fd);
	if (f.file)
		ret = f.file->f_mode & FMODE_PREAD ? vfs_read(f.file, buf, count, &pos) : -ESPIPE;
	fdput(f);
	return ret;
}

ssize_t ksys_pwrite64(unsigned int fd, const char __user *buf, size_t count, loff_t pos)
{
	struct fd f;
	ssize_t ret = -EBADF;

	if (pos < 0)
		return -EINVAL;
	f = fdget(fd);
	if (f.file)
		ret = f.file->f_mode & FMODE_PWRITE ? vfs_write(f.file, buf, count, &pos) : -ESPIPE;
	fdput(f);
	return ret;
}

loff_t ksys_lseek(unsigned int fd, loff_t offset, unsigned int whence)
{
	struct fd f = fdget_pos(fd);
	loff_t retval = -EBADF;

	if (f.file) {
		retval = whence <= SEEK_END ? vfs_llseek(f.file, offset, whence) : -EINVAL;
		fdput_pos(f);
	}
	return retval;
}

SYSCALL_DEFINE3(read, unsigned int, fd, char __user *, buf, size_t, count)
{
	return ksys_read(fd, buf, count);
}

SYSCALL_DEFINE3(write, unsigned int, fd, const char __user *, buf, size_t, count)
{
	return ksys_write(fd, buf, count);
}

SYSCALL_DEFINE4(pread64, unsigned int, fd, char __user *, buf, size_t, count, loff_t, pos)
{
	return ksys_pread64(fd, buf, count, pos);
}

SYSCALL_DEFINE4(pwrite64, unsigned int, fd, const char __user *, buf, size_t, count, loff_t, pos)
{
	return ksys_pwrite64(fd, buf, count, pos);
}

SYSCALL_DEFINE3(lseek, unsigned int, fd, off_t, offset, unsigned int, whence)
{
	return ksys_lseek(fd, offset, whence);
}

int noop_fsync(struct file *file __attribute__((unused)), loff_t start __attribute__((unused)),
	       loff_t end __attribute__((unused)), int datasync __attribute__((unused)))
{
	return 0;
}

int vfs_fsync_range(struct file *file, loff_t start, loff_t end, int datasync)
{
	if (!file->f_op->fsync)
		return -EINVAL;
	return file->f_op->fsync(file, start, end, datasync);
}

noinline int vfs_fsync(struct file *file, int datasync)
{
	return vfs_fsync_range(file, 0, LLONG_MAX, datasync);
}

static noinline int do_fsync(unsigned int fd, int datasync)
{
	struct fd f = fdget(fd);
	int ret = -EBADF;

	if (f.file)
		ret = vfs_fsync(f.file, datasync);
	fdput(f);
	return ret;
}

SYSCALL_DEFINE1(fsync, unsigned int, fd)
{
	return do_fsync(fd, 0);
}

SYSCALL_DEFINE1(fdatasync, unsigned int, fd)
{
	return do_fsync(fd, 1);
}
