// SPDX-License-Identifier: GPL-2.0-or-later
// Sorting as a workload: arrays and lists of pseudo-random numbers, checked afterwards.
#include "errno.h"
#include "list.h"
#include "mm.h"
#include "printk.h"
#include "string.h"

struct sort_element {
	struct list_head list;
	u64 value;
};

int cmpint(const void *a, const void *b)
{
	const int *x = a, *y = b;

	return *x < *y ? -1 : *x > *y;
}

int cmp_element(void *priv __attribute__((unused)), const struct list_head *a,
		const struct list_head *b)
{
	u64 x = list_entry(a, struct sort_element, list)->value;
	u64 y = list_entry(b, struct sort_element, list)->value;

	return x > y;
}

static u32 next_random(u32 *state)
{
	*state = *state * 1664525 + 1013904223;
	return *state >> 1;
}

/* Returns 0, or an error where memory is short or the order is wrong. */
int test_sort(unsigned int n, u32 seed)
{
	int *a = kcalloc(n, sizeof(*a), GFP_KERNEL);
	unsigned int i;
	int err = 0;

	if (!a)
		return -ENOMEM;
	for (i = 0; i < n; i++)
		a[i] = (int)next_random(&seed);
	sort(a, n, sizeof(*a), cmpint, NULL);
	for (i = 1; i < n; i++)
		if (a[i - 1] > a[i])
			err = -EINVAL;
	kfree(a);
	return err;
}

int test_list_sort(unsigned int n, u32 seed)
{
	struct sort_element *elements = kcalloc(n, sizeof(*elements), GFP_KERNEL), *el;
	LIST_HEAD(head);
	unsigned int i;
	u64 last = 0;
	int err = 0;

	if (!elements)
		return -ENOMEM;
	for (i = 0; i < n; i++) {
		elements[i].value = next_random(&seed);
		list_add_tail(&elements[i].list, &head);
	}
	list_sort(NULL, &head, cmp_element);
	list_for_each_entry(el, &head, list) {
		if (el->value < last)
			err = -EINVAL;
		last = el->value;
	}
	kfree(elements);
	return err;
}
