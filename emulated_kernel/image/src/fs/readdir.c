// SPDX-License-Identifier: GPL-2.0-or-later
// Reading directories into the buffer of getdents64(2).
#include "errno.h"
#include "fs.h"
#include "printk.h"
#include "syscalls.h"
#include "uaccess.h"

struct getdents_callback64 {
	struct dir_context ctx;
	char __user *current_dir;
	char __user *previous;
	int count;
	int error;
};

int iterate_dir(struct file *file, struct dir_context *ctx)
{
	struct inode *inode = file->f_inode;
	int res;

	if (!file->f_op->iterate_shared)
		return -ENOTDIR;
	inode_lock(inode);
	ctx->pos = file->f_pos;
	res = file->f_op->iterate_shared(file, ctx);
	file->f_pos = ctx->pos;
	inode_unlock(inode);
	touch_atime(&file->f_path);
	return res;
}

static bool put_previous_offset(struct getdents_callback64 *buf, s64 offset)
{
	char __user *field = buf->previous + offsetof(struct linux_dirent64, d_off);

	return !buf->previous || !copy_to_user(field, &offset, sizeof(offset));
}

static bool filldir64(struct dir_context *ctx, const char *name, int namlen, loff_t offset,
		      u64 ino, unsigned int d_type)
{
	struct getdents_callback64 *buf = container_of(ctx, struct getdents_callback64, ctx);
	int base = offsetof(struct linux_dirent64, d_name);
	int reclen = ALIGN(base + namlen + 1, 8);
	struct linux_dirent64 head = { .d_ino = ino, .d_reclen = (u16)reclen, .d_type = (u8)d_type };
	char nul = 0;

	buf->error = -EINVAL;
	if (reclen > buf->count)
		return false;
	buf->error = -EFAULT;
	if (!put_previous_offset(buf, offset) || copy_to_user(buf->current_dir, &head, base) ||
	    copy_to_user(buf->current_dir + base, name, namlen) ||
	    copy_to_user(buf->current_dir + base + namlen, &nul, 1))
		return false;
	buf->error = 0;
	buf->previous = buf->current_dir;
	buf->current_dir += reclen;
	buf->count -= reclen;
	return true;
}

SYSCALL_DEFINE3(getdents64, unsigned int, fd, struct linux_dirent64 __user *, dirent, unsigned int, count)
{
	struct fd f = fdget(fd);
	struct getdents_callback64 buf = {
		.ctx.actor = filldir64,
		.current_dir = (char *)dirent,
		.count = (int)count,
	};
	int error;

	if (!f.file)
		return -EBADF;
	error = iterate_dir(f.file, &buf.ctx);
	if (error >= 0)
		error = buf.error;
	if (buf.previous)
		error = put_previous_offset(&buf, buf.ctx.pos) ? (int)count - buf.count : -EFAULT;
	fdput(f);
	return error;
}
