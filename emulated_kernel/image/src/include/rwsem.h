/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Locks that sleep: for many readers or one writer, and counting ones. */
#ifndef _RWSEM_H
#define _RWSEM_H

#include "wait.h"

#define RWSEM_WRITER (-1)

struct rw_semaphore {
	spinlock_t wait_lock;
	int count;            /* readers inside, or RWSEM_WRITER */
	unsigned int writers; /* that wait: no reader overtakes them */
	wait_queue_head_t wait;
};

struct semaphore {
	spinlock_t lock;
	unsigned int count;
	wait_queue_head_t wait;
};

void init_rwsem(struct rw_semaphore *sem);
void down_read(struct rw_semaphore *sem);
int down_read_trylock(struct rw_semaphore *sem);
void up_read(struct rw_semaphore *sem);
void down_write(struct rw_semaphore *sem);
int down_write_trylock(struct rw_semaphore *sem);
void up_write(struct rw_semaphore *sem);
void downgrade_write(struct rw_semaphore *sem);

void sema_init(struct semaphore *sem, int val);
void down(struct semaphore *sem);
int down_trylock(struct semaphore *sem);
void up(struct semaphore *sem);

#endif
