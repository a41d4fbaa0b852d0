// SPDX-License-Identifier: GPL-2.0-or-later
// A stable merge sort of a linked list, from runs of one upwards.
#include "list.h"

static noinline struct list_head *merge(void *priv, list_cmp_func_t cmp, struct list_head *a,
			       struct list_head *b)
{
	struct list_head *head = NULL, **tail = &head;

	while (a && b) {
		if (cmp(priv, a, b) <= 0) {
			*tail = a;
			a = a->next;
		} else {
			*tail = b;
			b = b->next;
		}
		tail = &(*tail)->next;
	}
	*tail = a ? a : b;
	return head;
}

static struct list_head *cut_run(struct list_head *list, unsigned long n)
{
	struct list_head *rest;

	while (list && --n)
		list = list->next;
	if (!list)
		return NULL;
	rest = list->next;
	list->next = NULL;
	return rest;
}

/* One pass: merges neighbouring runs of n; returns how many pairs there were. */
static noinline unsigned long merge_pass(void *priv, list_cmp_func_t cmp, struct list_head **list,
				unsigned long n)
{
	struct list_head *a = *list, *b, *rest, **tail = list;
	unsigned long pairs = 0;

	while (a) {
		b = cut_run(a, n);
		rest = cut_run(b, n);
		*tail = merge(priv, cmp, a, b);
		while (*tail)
			tail = &(*tail)->next;
		a = rest;
		pairs++;
	}
	return pairs;
}

void list_sort(void *priv, struct list_head *head, list_cmp_func_t cmp)
{
	struct list_head *list, *prev = head;
	unsigned long n;

	if (list_empty(head))
		return;
	list = head->next;
	head->prev->next = NULL;
	for (n = 1; merge_pass(priv, cmp, &list, n) > 1; n *= 2)
		;
	for (head->next = list; list; list = list->next) {
		list->prev = prev;
		prev = list;
	}
	prev->next = head;
	head->prev = prev;
}
