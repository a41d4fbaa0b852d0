// SPDX-License-Identifier: GPL-2.0-or-later
// Pipes: a ring of pages between those who write and those who read.
#include "errno.h"
#include "fs.h"
#include "mm.h"
#include "pipe_fs_i.h"
#include "printk.h"
#include "syscalls.h"
#include "uaccess.h"

#define PIPEFS_MAGIC 0x50495045

static struct super_block pipefs_sb = { .s_magic = PIPEFS_MAGIC, .s_dev = 0xc, .s_pseudo = "pipe" };
static struct kmem_cache *pipe_cachep;
static const struct file_operations pipefifo_fops;

__init void init_pipe_fs(void)
{
	pipe_cachep = kmem_cache_create("pipe_inode_info", sizeof(struct pipe_inode_info), 64, 0, NULL);
}

struct pipe_inode_info *alloc_pipe_info(void)
{
	struct pipe_inode_info *pipe = kmem_cache_zalloc(pipe_cachep, GFP_KERNEL);

	if (!pipe)
		return NULL;
	pipe->ring_size = PIPE_DEF_BUFFERS;
	mutex_init(&pipe->mutex);
	init_waitqueue_head(&pipe->rd_wait);
	init_waitqueue_head(&pipe->wr_wait);
	return pipe;
}

void free_pipe_info(struct pipe_inode_info *pipe)
{
	while (!pipe_empty(pipe->head, pipe->tail))
		put_page(pipe_buf(pipe, pipe->tail++)->page);
	if (pipe->tmp_page)
		put_page(pipe->tmp_page);
	kmem_cache_free(pipe_cachep, pipe);
}

/* Keeps one page for the next write, as most buffers are emptied while another one is on its way. */
static noinline void anon_pipe_buf_release(struct pipe_inode_info *pipe, struct pipe_buffer *buf)
{
	if (!pipe->tmp_page)
		pipe->tmp_page = buf->page;
	else
		put_page(buf->page);
	buf->page = NULL;
}

static bool pipe_readable(const struct pipe_inode_info *pipe)
{
	return !pipe_empty(READ_ONCE(pipe->head), READ_ONCE(pipe->tail)) || !READ_ONCE(pipe->writers);
}

static bool pipe_writable(const struct pipe_inode_info *pipe)
{
	return !pipe_full(READ_ONCE(pipe->head), READ_ONCE(pipe->tail), pipe->ring_size) ||
	       !READ_ONCE(pipe->readers);
}

/* Takes what is there into the reader's buffer; bytes, or an error where it couldn't take any. */
static noinline ssize_t pipe_take(struct pipe_inode_info *pipe, struct iov_iter *to)
{
	struct pipe_buffer *buf;
	size_t chars, written;
	ssize_t ret = 0;

	while (to->count && !pipe_empty(pipe->head, pipe->tail)) {
		buf = pipe_buf(pipe, pipe->tail);
		chars = min((size_t)buf->len, to->count);
		written = copy_page_to_iter(buf->page, buf->offset, chars, to);
		if (unlikely(written < chars))
			return ret ? ret : -EFAULT;
		ret += chars;
		buf->offset += chars;
		buf->len -= chars;
		if (buf->len)
			break;
		anon_pipe_buf_release(pipe, buf);
		pipe->tail++;
	}
	return ret;
}

static ssize_t pipe_read(struct kiocb *iocb, struct iov_iter *to)
{
	struct file *filp = iocb->ki_filp;
	struct pipe_inode_info *pipe = filp->private_data;
	bool was_full;
	ssize_t ret;

	if (unlikely(!to->count))
		return 0;
	for (;;) {
		mutex_lock(&pipe->mutex);
		was_full = pipe_full(pipe->head, pipe->tail, pipe->ring_size);
		ret = pipe_take(pipe, to);
		if (!ret && pipe->writers && filp->f_flags & O_NONBLOCK)
			ret = -EAGAIN;
		if (ret || !pipe->writers)
			break;
		mutex_unlock(&pipe->mutex);
		wait_event_interruptible(&pipe->rd_wait, pipe_readable(pipe));
	}
	if (pipe_empty(pipe->head, pipe->tail))
		was_full = false;
	mutex_unlock(&pipe->mutex);
	if (was_full || ret > 0)
		wake_up_interruptible(&pipe->wr_wait);
	return ret;
}

/* A little that fits behind the last buffer goes there, so that small writes don't take a page each. */
static noinline ssize_t pipe_append(struct pipe_inode_info *pipe, struct iov_iter *from)
{
	struct pipe_buffer *buf = pipe_buf(pipe, pipe->head - 1);
	size_t chars = from->count & (PAGE_SIZE - 1), offset;

	if (pipe_empty(pipe->head, pipe->tail) || !chars)
		return 0;
	offset = buf->offset + buf->len;
	if (offset + chars > PAGE_SIZE)
		return 0;
	if (copy_page_from_iter(buf->page, offset, chars, from) < chars)
		return -EFAULT;
	buf->len += chars;
	return (ssize_t)chars;
}

/* One more page; the ring has room for it. */
static noinline ssize_t pipe_add_page(struct pipe_inode_info *pipe, struct iov_iter *from)
{
	struct page *page = pipe->tmp_page ? pipe->tmp_page : alloc_page(GFP_USER);
	struct pipe_buffer *buf;
	size_t copied;

	if (unlikely(!page))
		return -ENOMEM;
	pipe->tmp_page = page;
	copied = copy_page_from_iter(page, 0, PAGE_SIZE, from);
	if (unlikely(!copied))
		return -EFAULT;
	buf = pipe_buf(pipe, pipe->head);
	buf->page = page;
	buf->offset = 0;
	buf->len = copied;
	pipe->tmp_page = NULL;
	pipe->head++;
	return (ssize_t)copied;
}

/* Fills what is free; bytes, 0 for a full ring, or an error. The caller holds the mutex. */
static noinline ssize_t pipe_fill(struct pipe_inode_info *pipe, struct iov_iter *from)
{
	ssize_t ret = 0, done;

	while (from->count && !pipe_full(pipe->head, pipe->tail, pipe->ring_size)) {
		done = pipe_add_page(pipe, from);
		if (done < 0)
			return ret ? ret : done;
		ret += done;
	}
	return ret;
}

static ssize_t pipe_write(struct kiocb *iocb, struct iov_iter *from)
{
	struct file *filp = iocb->ki_filp;
	struct pipe_inode_info *pipe = filp->private_data;
	ssize_t ret = 0, done;

	if (unlikely(!from->count))
		return 0;
	mutex_lock(&pipe->mutex);
	done = pipe->readers ? pipe_append(pipe, from) : 0;
	for (;;) {
		if (!pipe->readers) {
			send_sig(SIGPIPE, current, 0);
			done = -EPIPE;
		}
		if (done >= 0) {
			ret += done;
			done = pipe_fill(pipe, from);
		}
		if (done >= 0)
			ret += done;
		else if (!ret)
			ret = done;
		if (done < 0 || !from->count)
			break;
		if (filp->f_flags & O_NONBLOCK) {
			ret = ret ? ret : -EAGAIN;
			break;
		}
		mutex_unlock(&pipe->mutex);
		wake_up_interruptible(&pipe->rd_wait);
		wait_event_interruptible(&pipe->wr_wait, pipe_writable(pipe));
		mutex_lock(&pipe->mutex);
		done = 0;
	}
	mutex_unlock(&pipe->mutex);
	if (ret > 0)
		wake_up_interruptible(&pipe->rd_wait);
	return ret;
}

static unsigned int pipe_poll(struct file *filp, poll_table *wait)
{
	struct pipe_inode_info *pipe = filp->private_data;
	unsigned int mask = 0;

	if (filp->f_mode & FMODE_READ) {
		poll_wait(filp, &pipe->rd_wait, wait);
		if (!pipe_empty(pipe->head, pipe->tail))
			mask |= EPOLLIN | EPOLLRDNORM;
		if (!pipe->writers)
			mask |= EPOLLHUP;
	}
	if (filp->f_mode & FMODE_WRITE) {
		poll_wait(filp, &pipe->wr_wait, wait);
		if (!pipe_full(pipe->head, pipe->tail, pipe->ring_size))
			mask |= EPOLLOUT | EPOLLWRNORM;
		if (!pipe->readers)
			mask |= EPOLLERR;
	}
	return mask;
}

static noinline void put_pipe_info(struct inode *inode, struct pipe_inode_info *pipe)
{
	if (--pipe->files)
		return;
	inode->i_pipe = NULL;
	free_pipe_info(pipe);
}

static int pipe_release(struct inode *inode, struct file *file)
{
	struct pipe_inode_info *pipe = file->private_data;

	mutex_lock(&pipe->mutex);
	if (file->f_mode & FMODE_READ)
		pipe->readers--;
	if (file->f_mode & FMODE_WRITE)
		pipe->writers--;
	mutex_unlock(&pipe->mutex);
	wake_up_interruptible_all(&pipe->rd_wait);
	wake_up_interruptible_all(&pipe->wr_wait);
	put_pipe_info(inode, pipe);
	return 0;
}

static const struct file_operations pipefifo_fops = {
	.read_iter = pipe_read,
	.write_iter = pipe_write,
	.poll = pipe_poll,
	.release = pipe_release,
};

static noinline struct inode *get_pipe_inode(void)
{
	struct inode *inode = new_inode(&pipefs_sb);

	if (!inode)
		return NULL;
	inode->i_pipe = alloc_pipe_info();
	if (!inode->i_pipe) {
		iput(inode);
		return NULL;
	}
	inode_init_owner(&init_user_ns, inode, NULL, S_IFIFO | 0600);
	inode->i_fop = &pipefifo_fops;
	inode->i_pipe->files = 2;
	inode->i_pipe->readers = inode->i_pipe->writers = 1;
	inode->i_atime = inode->i_mtime = inode->i_ctime = current_time(inode);
	return inode;
}

/* The reading end, then the writing one. */
int create_pipe_files(struct file **res, int flags)
{
	struct inode *inode = get_pipe_inode();
	struct file *f;

	if (!inode)
		return -ENFILE;
	f = alloc_file_pseudo(inode, &pipefs_sb, O_WRONLY | (flags & O_NONBLOCK), &pipefifo_fops);
	if (IS_ERR(f)) {
		free_pipe_info(inode->i_pipe);
		iput(inode);
		return (int)PTR_ERR(f);
	}
	f->private_data = inode->i_pipe;
	res[0] = alloc_file_clone(f, O_RDONLY | (flags & O_NONBLOCK), &pipefifo_fops);
	if (IS_ERR(res[0])) {
		inode->i_pipe->files = inode->i_pipe->writers = 1;
		fput(f);
		return (int)PTR_ERR(res[0]);
	}
	res[0]->private_data = inode->i_pipe;
	res[1] = f;
	return 0;
}

static int __do_pipe_flags(int *fd, struct file **files, int flags)
{
	int error;

	if (flags & ~(O_CLOEXEC | O_NONBLOCK))
		return -EINVAL;
	error = create_pipe_files(files, flags);
	if (error)
		return error;
	fd[0] = error = get_unused_fd_flags(flags);
	if (error < 0)
		goto err_read_pipe;
	fd[1] = error = get_unused_fd_flags(flags);
	if (error < 0)
		goto err_fdr;
	return 0;

err_fdr:
	put_unused_fd(fd[0]);
err_read_pipe:
	fput(files[0]);
	fput(files[1]);
	return error;
}

int do_pipe2(int __user *fildes, int flags)
{
	struct file *files[2];
	int fd[2];
	int error = __do_pipe_flags(fd, files, flags);

	if (error)
		return error;
	if (unlikely(copy_to_user(fildes, fd, sizeof(fd)))) {
		fput(files[0]);
		fput(files[1]);
		put_unused_fd(fd[0]);
		put_unused_fd(fd[1]);
		return -EFAULT;
	}
	fd_install(fd[0], files[0]);
	fd_install(fd[1], files[1]);
	return 0;
}

SYSCALL_DEFINE2(pipe2, int __user *, fildes, int, flags)
{
	return do_pipe2(fildes, flags);
}

SYSCALL_DEFINE1(pipe, int __user *, fildes)
{
	return do_pipe2(fildes, 0);
}
