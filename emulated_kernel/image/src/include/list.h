/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Circular doubly linked lists and hash buckets. */
#ifndef _LIST_H
#define _LIST_H

#include "types.h"

#define LIST_HEAD_INIT(name) { &(name), &(name) }
#define LIST_HEAD(name) struct list_head name = LIST_HEAD_INIT(name)

static __always_inline void INIT_LIST_HEAD(struct list_head *list)
{
	list->next = list;
	list->prev = list;
}

static __always_inline void __list_add(struct list_head *entry, struct list_head *prev,
				       struct list_head *next)
{
	next->prev = entry;
	entry->next = next;
	entry->prev = prev;
	prev->next = entry;
}

static __always_inline void list_add(struct list_head *entry, struct list_head *head)
{
	__list_add(entry, head, head->next);
}

static __always_inline void list_add_tail(struct list_head *entry, struct list_head *head)
{
	__list_add(entry, head->prev, head);
}

static __always_inline void list_del(struct list_head *entry)
{
	entry->next->prev = entry->prev;
	entry->prev->next = entry->next;
	entry->next = entry->prev = NULL;
}

static __always_inline void list_del_init(struct list_head *entry)
{
	entry->next->prev = entry->prev;
	entry->prev->next = entry->next;
	INIT_LIST_HEAD(entry);
}

static __always_inline bool list_empty(const struct list_head *head)
{
	return head->next == head;
}

/* Another CPU may be in the middle of list_del_init(): true once it is through. */
static __always_inline bool list_empty_careful(const struct list_head *head)
{
	struct list_head *next = READ_ONCE(head->next);

	return next == head && next == READ_ONCE(head->prev);
}

static __always_inline void list_move_tail(struct list_head *entry, struct list_head *head)
{
	list_del(entry);
	list_add_tail(entry, head);
}

#define list_entry(ptr, type, member) container_of(ptr, type, member)
#define list_first_entry(head, type, member) list_entry((head)->next, type, member)
#define list_for_each(pos, head) for (pos = (head)->next; pos != (head); pos = pos->next)
#define list_for_each_entry(pos, head, member)                             \
	for (pos = list_entry((head)->next, typeof(*pos), member);         \
	     &pos->member != (head); pos = list_entry(pos->member.next, typeof(*pos), member))
#define list_for_each_entry_safe(pos, n, head, member)                     \
	for (pos = list_entry((head)->next, typeof(*pos), member),         \
	     n = list_entry(pos->member.next, typeof(*pos), member);       \
	     &pos->member != (head); pos = n, n = list_entry(n->member.next, typeof(*n), member))

static __always_inline void hlist_add_head(struct hlist_node *n, struct hlist_head *h)
{
	n->next = h->first;
	if (h->first)
		h->first->pprev = &n->next;
	h->first = n;
	n->pprev = &h->first;
}

static __always_inline bool hlist_unhashed(const struct hlist_node *n)
{
	return !n->pprev;
}

static __always_inline void hlist_del_init(struct hlist_node *n)
{
	if (hlist_unhashed(n))
		return;
	*n->pprev = n->next;
	if (n->next)
		n->next->pprev = n->pprev;
	n->next = NULL;
	n->pprev = NULL;
}

#define hlist_entry_safe(ptr, type, member)                                \
	({ struct hlist_node *_n = (ptr); _n ? container_of(_n, type, member) : NULL; })
#define hlist_for_each_entry(pos, head, member)                            \
	for (pos = hlist_entry_safe((head)->first, typeof(*pos), member); pos; \
	     pos = hlist_entry_safe(pos->member.next, typeof(*pos), member))

typedef int (*list_cmp_func_t)(void *priv, const struct list_head *a, const struct list_head *b);
void list_sort(void *priv, struct list_head *head, list_cmp_func_t cmp);

#endif
