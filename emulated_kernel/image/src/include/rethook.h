/* SPDX-License-Identifier: GPL-2.0-or-later */
/* A hooked call that has not returned; its data follows. Only the host works on it. */
#ifndef _RETHOOK_H
#define _RETHOOK_H

#include "types.h"

struct rethook;

struct rethook_node {
	unsigned long pool[2];   /* what the pool of free nodes keeps here */
	struct llist_node llist; /* next older call of the task */
	struct rethook *rethook;
	unsigned long ret_addr; /* real return address */
	unsigned long frame;    /* address of the stack slot */
};

#endif
