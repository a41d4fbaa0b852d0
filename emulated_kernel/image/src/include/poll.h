/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Waiting for any of several files: the events, and the table that a file adds its queues to. */
#ifndef _POLL_H
#define _POLL_H

#include "wait.h"

#define EPOLLIN 0x001
#define EPOLLOUT 0x004
#define EPOLLERR 0x008
#define EPOLLHUP 0x010
#define EPOLLNVAL 0x020
#define EPOLLRDNORM 0x040
#define EPOLLWRNORM 0x100
#define POLL_QUEUES 16

struct file;

struct poll_table_entry {
	struct file *filp;
	wait_queue_entry_t wait;
	wait_queue_head_t *wait_address;
};

/* Queues of one poll(2); those that find no room aren't waited on. */
typedef struct poll_table_struct {
	unsigned int nr;
	struct poll_table_entry entries[POLL_QUEUES];
} poll_table;

void poll_wait(struct file *filp, wait_queue_head_t *wait_address, poll_table *p);

/* The layout of user space. */
struct pollfd {
	int fd;
	short events;
	short revents;
};

#endif
