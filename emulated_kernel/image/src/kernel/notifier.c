// SPDX-License-Identifier: GPL-2.0-or-later
// Notifier chains: sorted by priority, called one by one until one of them objects.
#include "errno.h"
#include "notifier.h"

int blocking_notifier_chain_register(struct blocking_notifier_head *nh, struct notifier_block *nb)
{
	struct notifier_block **at = &nh->head;

	mutex_lock(&nh->lock);
	while (*at && (*at)->priority >= nb->priority)
		at = &(*at)->next;
	nb->next = *at;
	*at = nb;
	mutex_unlock(&nh->lock);
	return 0;
}

int blocking_notifier_chain_unregister(struct blocking_notifier_head *nh,
				       struct notifier_block *nb)
{
	struct notifier_block **at = &nh->head;
	int ret = -ENOENT;

	mutex_lock(&nh->lock);
	for (; *at; at = &(*at)->next) {
		if (*at == nb) {
			*at = nb->next;
			ret = 0;
			break;
		}
	}
	mutex_unlock(&nh->lock);
	return ret;
}

static int notifier_call_chain(struct notifier_block *nb, unsigned long val, void *v)
{
	struct notifier_block *next;
	int ret = NOTIFY_DONE;

	for (; nb; nb = next) {
		next = nb->next;
		ret = nb->notifier_call(nb, val, v);
		if (ret & NOTIFY_STOP_MASK)
			break;
	}
	return ret;
}

int blocking_notifier_call_chain(struct blocking_notifier_head *nh, unsigned long val, void *v)
{
	int ret;

	mutex_lock(&nh->lock);
	ret = notifier_call_chain(nh->head, val, v);
	mutex_unlock(&nh->lock);
	return ret;
}
