// SPDX-License-Identifier: GPL-2.0-or-later
// Heap sort of an array and binary search in one.
#include "printk.h"
#include "string.h"

static void swap_bytes(void *a, void *b, int size)
{
	char *p = a, *q = b, t;

	while (size-- > 0) {
		t = *p;
		*p++ = *q;
		*q++ = t;
	}
}

static void swap_words_64(void *a, void *b, int size)
{
	u64 *p = a, *q = b, t;

	for (; size > 0; size -= 8) {
		t = *p;
		*p++ = *q;
		*q++ = t;
	}
}

static noinline void sift_down(char *base, size_t root, size_t num, size_t size, cmp_func_t cmp,
		      swap_func_t swap_func)
{
	size_t child;

	while ((child = 2 * root + 1) < num) {
		if (child + 1 < num && cmp(base + child * size, base + (child + 1) * size) < 0)
			child++;
		if (cmp(base + root * size, base + child * size) >= 0)
			return;
		swap_func(base + root * size, base + child * size, (int)size);
		root = child;
	}
}

void sort(void *base, size_t num, size_t size, cmp_func_t cmp_func, swap_func_t swap_func)
{
	size_t i;

	if (!swap_func)
		swap_func = ((uintptr_t)base | size) & 7 ? swap_bytes : swap_words_64;
	for (i = num / 2; i-- > 0;)
		sift_down(base, i, num, size, cmp_func, swap_func);
	for (i = num; i-- > 1;) {
		swap_func(base, (char *)base + i * size, (int)size);
		sift_down(base, 0, i, size, cmp_func, swap_func);
	}
}

void *bsearch(const void *key, const void *base, size_t num, size_t size, cmp_func_t cmp)
{
	const char *pivot, *low = base;
	int result;

	while (num > 0) {
		pivot = low + (num >> 1) * size;
		result = cmp(key, pivot);
		if (result == 0)
			return (void *)pivot;
		if (result > 0) {
			low = pivot + size;
			num--;
		}
		num >>= 1;
	}
	return NULL;
}
