/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Chains of functions that are called when something happens. */
#ifndef _NOTIFIER_H
#define _NOTIFIER_H

#include "wait.h"

#define NOTIFY_DONE 0
#define NOTIFY_OK 1
#define NOTIFY_STOP_MASK 0x8000

struct notifier_block {
	int (*notifier_call)(struct notifier_block *nb, unsigned long action, void *data);
	struct notifier_block *next;
	int priority; /* the highest is called first */
};

struct blocking_notifier_head {
	struct mutex lock;
	struct notifier_block *head;
};

#define BLOCKING_NOTIFIER_HEAD(name) \
	struct blocking_notifier_head name = { __MUTEX_INITIALIZER((name).lock), NULL }

static __always_inline int notifier_from_errno(int err)
{
	return err ? NOTIFY_STOP_MASK | (NOTIFY_OK - err) : NOTIFY_OK;
}

static __always_inline int notifier_to_errno(int ret)
{
	ret &= ~NOTIFY_STOP_MASK;
	return ret > NOTIFY_OK ? NOTIFY_OK - ret : 0;
}

int blocking_notifier_chain_register(struct blocking_notifier_head *nh, struct notifier_block *nb);
int blocking_notifier_chain_unregister(struct blocking_notifier_head *nh,
				       struct notifier_block *nb);
int blocking_notifier_call_chain(struct blocking_notifier_head *nh, unsigned long val, void *v);

#endif
