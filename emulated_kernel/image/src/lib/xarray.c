// SPDX-License-Identifier: GPL-2.0-or-later
// Arrays of pointers as trees of small nodes: a node for each four bits of the index.
#include "xarray.h"
#include "errno.h"
#include "mm.h"
#include "printk.h"

static struct xa_node *xa_alloc_node(unsigned int shift, gfp_t gfp)
{
	struct xa_node *node = kzalloc(sizeof(*node), gfp);

	if (node)
		node->shift = shift;
	return node;
}

static unsigned int slot_of(const struct xa_node *node, unsigned long index)
{
	return (index >> node->shift) & (XA_CHUNK_SIZE - 1);
}

static bool reaches(const struct xa_node *node, unsigned long index)
{
	unsigned int bits = node->shift + XA_CHUNK_SHIFT;

	return bits >= (unsigned int)BITS_PER_LONG || !(index >> bits);
}

void *xa_load(struct xarray *xa, unsigned long index)
{
	struct xa_node *node = xa->xa_head;

	if (!node || !reaches(node, index))
		return NULL;
	while (node && node->shift)
		node = node->slots[slot_of(node, index)];
	return node ? node->slots[slot_of(node, index)] : NULL;
}

/* Puts nodes above the topmost one until it reaches the index. */
static noinline int xas_expand(struct xarray *xa, unsigned long index, gfp_t gfp)
{
	struct xa_node *node;

	if (!xa->xa_head)
		xa->xa_head = xa_alloc_node(0, gfp);
	while (xa->xa_head && !reaches(xa->xa_head, index)) {
		node = xa_alloc_node(xa->xa_head->shift + XA_CHUNK_SHIFT, gfp);
		if (!node)
			return -ENOMEM;
		node->slots[0] = xa->xa_head;
		node->count = 1;
		xa->xa_head = node;
	}
	return xa->xa_head ? 0 : -ENOMEM;
}

static noinline void *xas_store(struct xa_node *node, unsigned long index, void *entry, gfp_t gfp)
{
	void **slot = &node->slots[slot_of(node, index)], *old;

	while (node->shift) {
		if (!*slot) {
			*slot = xa_alloc_node(node->shift - XA_CHUNK_SHIFT, gfp);
			if (!*slot)
				return ERR_PTR(-ENOMEM);
			node->count++;
		}
		node = *slot;
		slot = &node->slots[slot_of(node, index)];
	}
	old = *slot;
	node->count += !old;
	*slot = entry;
	return old;
}

void *xa_store(struct xarray *xa, unsigned long index, void *entry, gfp_t gfp)
{
	int error;

	if (!entry)
		return xa_erase(xa, index);
	error = xas_expand(xa, index, gfp);
	return error ? ERR_PTR(error) : xas_store(xa->xa_head, index, entry, gfp);
}

/* Empties a slot below; nodes that have nothing left go. */
static noinline void *xas_erase(struct xa_node **pnode, unsigned long index)
{
	struct xa_node *node = *pnode, *child;
	unsigned int slot = slot_of(node, index);
	void *old = node->slots[slot];

	if (!old)
		return NULL;
	if (node->shift) {
		child = old;
		old = xas_erase(&child, index);
		node->slots[slot] = child;
	} else {
		node->slots[slot] = NULL;
	}
	if (!node->slots[slot] && !--node->count) {
		kfree(node);
		*pnode = NULL;
	}
	return old;
}

void *xa_erase(struct xarray *xa, unsigned long index)
{
	if (!xa->xa_head || !reaches(xa->xa_head, index))
		return NULL;
	return xas_erase(&xa->xa_head, index);
}

static noinline void *xas_find(struct xa_node *node, unsigned long base, unsigned long *index)
{
	unsigned int slot = *index > base ? slot_of(node, *index) : 0;
	unsigned long first;
	void *found;

	for (; slot < XA_CHUNK_SIZE; slot++) {
		first = base + ((unsigned long)slot << node->shift);
		if (!node->slots[slot])
			continue;
		*index = max(*index, first);
		found = node->shift ? xas_find(node->slots[slot], first, index) : node->slots[slot];
		if (found)
			return found;
		*index = first + (1UL << node->shift);
	}
	return NULL;
}

void *xa_find(struct xarray *xa, unsigned long *index, unsigned long max)
{
	unsigned long found = *index;
	void *entry;

	if (!xa->xa_head || !reaches(xa->xa_head, found))
		return NULL;
	entry = xas_find(xa->xa_head, 0, &found);
	if (!entry || found > max)
		return NULL;
	*index = found;
	return entry;
}

static void xa_free_node(struct xa_node *node)
{
	unsigned int slot;

	for (slot = 0; node && node->shift && slot < XA_CHUNK_SIZE; slot++)
		xa_free_node(node->slots[slot]);
	kfree(node);
}

void xa_destroy(struct xarray *xa)
{
	xa_free_node(xa->xa_head);
	xa->xa_head = NULL;
}
