/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Packets in memory: a head that tells of them, and data that copies of the head may share. */
#ifndef _SKBUFF_H
#define _SKBUFF_H

#include "atomic.h"
#include "bottom_half.h"
#include "checksum.h"
#include "dropreason.h"
#include "gfp.h"
#include "list.h"

struct net_device;
struct sock;

/* Behind the data. */
struct skb_shared_info {
	atomic_t dataref;
};

struct sk_buff {
	struct list_head list; /* first, as that of the queue */
	struct sock *sk;
	struct net_device *dev;
	void (*destructor)(struct sk_buff *skb);
	unsigned int len;
	unsigned int truesize;
	atomic_t users;
	__be16 protocol;
	u16 network_header; /* offsets from head */
	u16 transport_header;
	unsigned char *head, *data, *tail, *end;
	char cb[24] __aligned(8);
};

struct sk_buff_head {
	struct list_head list;
	u32 qlen;
	spinlock_t lock;
};

#define MAX_HEADER 64 /* room for the headers of TCP and IP */

struct sk_buff *__alloc_skb(unsigned int size, gfp_t priority, int flags, int node);
#define alloc_skb(size, priority) __alloc_skb(size, priority, 0, -1)
struct sk_buff *skb_clone(struct sk_buff *skb, gfp_t gfp_mask);
struct sk_buff *skb_copy(const struct sk_buff *skb, gfp_t gfp_mask);
void __kfree_skb(struct sk_buff *skb);
void consume_skb(struct sk_buff *skb);
void kfree_skb_reason(struct sk_buff *skb, enum skb_drop_reason reason);
#define kfree_skb(skb) kfree_skb_reason(skb, SKB_DROP_REASON_NOT_SPECIFIED)
void *skb_put(struct sk_buff *skb, unsigned int len);
void *skb_push(struct sk_buff *skb, unsigned int len);
void *skb_pull(struct sk_buff *skb, unsigned int len);
void skb_trim(struct sk_buff *skb, unsigned int len);
void skb_queue_head_init(struct sk_buff_head *list);
void skb_queue_tail(struct sk_buff_head *list, struct sk_buff *newsk);
struct sk_buff *skb_dequeue(struct sk_buff_head *list);
void skb_queue_purge(struct sk_buff_head *list);
void skb_init(void);

static __always_inline void skb_reserve(struct sk_buff *skb, unsigned int len)
{
	skb->data += len;
	skb->tail += len;
}

static __always_inline struct skb_shared_info *skb_shinfo(const struct sk_buff *skb)
{
	return (struct skb_shared_info *)skb->end;
}

static __always_inline bool skb_cloned(const struct sk_buff *skb)
{
	return atomic_read(&skb_shinfo(skb)->dataref) != 1;
}

static __always_inline void skb_orphan(struct sk_buff *skb)
{
	if (skb->destructor)
		skb->destructor(skb);
	skb->destructor = NULL;
	skb->sk = NULL;
}

static __always_inline void skb_reset_network_header(struct sk_buff *skb)
{
	skb->network_header = (u16)(skb->data - skb->head);
}

static __always_inline void skb_reset_transport_header(struct sk_buff *skb)
{
	skb->transport_header = (u16)(skb->data - skb->head);
}

static __always_inline struct sk_buff *skb_peek(const struct sk_buff_head *list)
{
	return list_empty(&list->list) ? NULL : list_first_entry(&list->list, struct sk_buff, list);
}

/* These three: the caller holds what protects the queue. */
static __always_inline void __skb_queue_tail(struct sk_buff_head *list, struct sk_buff *skb)
{
	list_add_tail(&skb->list, &list->list);
	list->qlen++;
}

static __always_inline void __skb_unlink(struct sk_buff *skb, struct sk_buff_head *list)
{
	list_del_init(&skb->list);
	list->qlen--;
}

static __always_inline struct sk_buff *__skb_dequeue(struct sk_buff_head *list)
{
	struct sk_buff *skb = skb_peek(list);

	if (skb)
		__skb_unlink(skb, list);
	return skb;
}

#endif
