/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What a pipe consists of: counters that run freely over a ring of buffers, a page each. */
#ifndef _PIPE_FS_I_H
#define _PIPE_FS_I_H

#include "wait.h"

#define PIPE_DEF_BUFFERS 16

struct page;
struct file;

struct pipe_buffer {
	struct page *page;
	unsigned int offset, len;
};

struct pipe_inode_info {
	struct mutex mutex;
	wait_queue_head_t rd_wait, wr_wait;
	unsigned int head; /* where the next buffer is written */
	unsigned int tail; /* where the next one is read */
	unsigned int ring_size;
	unsigned int readers, writers, files;
	struct page *tmp_page; /* empty, for the next buffer */
	struct pipe_buffer bufs[PIPE_DEF_BUFFERS];
};

static __always_inline bool pipe_empty(unsigned int head, unsigned int tail)
{
	return head == tail;
}

static __always_inline bool pipe_full(unsigned int head, unsigned int tail, unsigned int limit)
{
	return head - tail >= limit;
}

static __always_inline struct pipe_buffer *pipe_buf(struct pipe_inode_info *pipe, unsigned int slot)
{
	return &pipe->bufs[slot % PIPE_DEF_BUFFERS];
}

struct pipe_inode_info *alloc_pipe_info(void);
void free_pipe_info(struct pipe_inode_info *pipe);
int create_pipe_files(struct file **res, int flags);
int do_pipe2(int __user *fildes, int flags);

#endif
