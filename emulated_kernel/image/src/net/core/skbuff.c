// SPDX-License-Identifier: GPL-2.0-or-later
// Packets: from their allocation to their end.
#include "skbuff.h"
#include "bug.h"
#include "mm.h"
#include "printk.h"
#include "string.h"
#include "tracepoint.h"

static struct kmem_cache *skbuff_cache;

__init void skb_init(void)
{
	skbuff_cache = kmem_cache_create("skbuff_head_cache", sizeof(struct sk_buff), 64, 0, NULL);
}

/* All room is behind the data, until skb_reserve() puts some before it. */
struct sk_buff *__alloc_skb(unsigned int size, gfp_t priority, int flags __attribute__((unused)),
			    int node __attribute__((unused)))
{
	struct sk_buff *skb = kmem_cache_zalloc(skbuff_cache, priority);

	if (unlikely(!skb))
		return NULL;
	size = ALIGN(size, 8U);
	skb->head = kmalloc(size + sizeof(struct skb_shared_info), priority);
	if (unlikely(!skb->head)) {
		kmem_cache_free(skbuff_cache, skb);
		return NULL;
	}
	skb->data = skb->tail = skb->head;
	skb->end = skb->head + size;
	skb->truesize = size + (unsigned int)sizeof(*skb);
	atomic_set(&skb->users, 1);
	atomic_set(&skb_shinfo(skb)->dataref, 1);
	INIT_LIST_HEAD(&skb->list);
	return skb;
}

static noinline void skb_release_data(struct sk_buff *skb)
{
	if (atomic_dec_and_test(&skb_shinfo(skb)->dataref))
		kfree(skb->head);
}

static noinline void skb_release_head_state(struct sk_buff *skb)
{
	skb_orphan(skb);
}

static noinline void kfree_skbmem(struct sk_buff *skb)
{
	kmem_cache_free(skbuff_cache, skb);
}

void __kfree_skb(struct sk_buff *skb)
{
	skb_release_head_state(skb);
	skb_release_data(skb);
	kfree_skbmem(skb);
}

/* A packet's good end; kfree_skb() is for those that are dropped. */
void consume_skb(struct sk_buff *skb)
{
	if (!skb || !atomic_dec_and_test(&skb->users))
		return;
	trace_consume_skb(skb);
	__kfree_skb(skb);
}

noinline void kfree_skb_reason(struct sk_buff *skb, enum skb_drop_reason reason)
{
	if (!skb || !atomic_dec_and_test(&skb->users))
		return;
	trace_kfree_skb(skb, __builtin_return_address(0), reason);
	__kfree_skb(skb);
}

struct sk_buff *skb_clone(struct sk_buff *skb, gfp_t gfp_mask)
{
	struct sk_buff *n = kmem_cache_alloc(skbuff_cache, gfp_mask);

	if (!n)
		return NULL;
	*n = *skb;
	n->sk = NULL;
	n->destructor = NULL;
	atomic_set(&n->users, 1);
	INIT_LIST_HEAD(&n->list);
	atomic_inc(&skb_shinfo(skb)->dataref);
	return n;
}

struct sk_buff *skb_copy(const struct sk_buff *skb, gfp_t gfp_mask)
{
	unsigned int headroom = (unsigned int)(skb->data - skb->head);
	struct sk_buff *n = __alloc_skb((unsigned int)(skb->end - skb->head), gfp_mask, 0, -1);

	if (!n)
		return NULL;
	skb_reserve(n, headroom);
	memcpy(skb_put(n, skb->len), skb->data, skb->len);
	n->protocol = skb->protocol;
	n->network_header = skb->network_header;
	n->transport_header = skb->transport_header;
	memcpy(n->cb, skb->cb, sizeof(n->cb));
	return n;
}

void *skb_put(struct sk_buff *skb, unsigned int len)
{
	void *tail = skb->tail;

	skb->tail += len;
	skb->len += len;
	BUG_ON(skb->tail > skb->end);
	return tail;
}

void *skb_push(struct sk_buff *skb, unsigned int len)
{
	skb->data -= len;
	skb->len += len;
	BUG_ON(skb->data < skb->head);
	return skb->data;
}

void *skb_pull(struct sk_buff *skb, unsigned int len)
{
	if (unlikely(len > skb->len))
		return NULL;
	skb->len -= len;
	return skb->data += len;
}

void skb_trim(struct sk_buff *skb, unsigned int len)
{
	if (skb->len <= len)
		return;
	skb->len = len;
	skb->tail = skb->data + len;
}

void skb_queue_head_init(struct sk_buff_head *list)
{
	INIT_LIST_HEAD(&list->list);
	list->qlen = 0;
	spin_lock_init(&list->lock);
}

void skb_queue_tail(struct sk_buff_head *list, struct sk_buff *newsk)
{
	unsigned long flags;

	spin_lock_irqsave(&list->lock, flags);
	__skb_queue_tail(list, newsk);
	spin_unlock_irqrestore(&list->lock, flags);
}

struct sk_buff *skb_dequeue(struct sk_buff_head *list)
{
	struct sk_buff *result;
	unsigned long flags;

	spin_lock_irqsave(&list->lock, flags);
	result = __skb_dequeue(list);
	spin_unlock_irqrestore(&list->lock, flags);
	return result;
}

void skb_queue_purge(struct sk_buff_head *list)
{
	struct sk_buff *skb;

	while ((skb = skb_dequeue(list)))
		kfree_skb(skb);
}
