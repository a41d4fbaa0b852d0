/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Workloads: each does so much of one thing, checks itself, and returns a checksum of 31 bits that depends
 * on its argument alone, or a negative error. They sleep: call them in a task.
 */
#ifndef _LOAD_H
#define _LOAD_H

#include "types.h"

int load_pipe(unsigned int n);
int load_files(unsigned int n);
int load_fork(unsigned int n);
int load_workqueue(unsigned int n);
int load_locks(unsigned int n);
int load_memory(unsigned int n);
int load_timers(unsigned int n);
int load_tcp(unsigned int n);
int load_udp(unsigned int n);
int load_ping(unsigned int n);

/* Fills a block with what the number says. */
#define LOAD_BLOCK 1024
void load_fill(u8 *block, unsigned int number);
u32 load_sum(u32 sum, const u8 *block);
#define load_result(sum) ((int)((sum) & 0x7fffffff))

#endif
