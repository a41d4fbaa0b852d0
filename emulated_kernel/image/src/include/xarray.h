/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Arrays of pointers that grow as needed, and numbers given out for pointers. */
#ifndef _XARRAY_H
#define _XARRAY_H

#include "types.h"

#define XA_CHUNK_SHIFT 4
#define XA_CHUNK_SIZE (1U << XA_CHUNK_SHIFT)

struct xa_node {
	unsigned int shift; /* bits of the index below this node's */
	unsigned int count; /* slots in use */
	void *slots[XA_CHUNK_SIZE];
};

struct xarray {
	struct xa_node *xa_head;
};

#define XARRAY_INIT { NULL }
void *xa_load(struct xarray *xa, unsigned long index);
/* What was there before, or an error pointer. NULL as the entry erases. */
void *xa_store(struct xarray *xa, unsigned long index, void *entry, gfp_t gfp);
void *xa_erase(struct xarray *xa, unsigned long index);
/* The first entry from *index on up to max; *index becomes its own. */
void *xa_find(struct xarray *xa, unsigned long *index, unsigned long max);
void xa_destroy(struct xarray *xa);
#define xa_for_each(xa, index, entry)                                      \
	for (index = 0, entry = xa_find(xa, &index, ULONG_MAX); entry;     \
	     entry = ++index ? xa_find(xa, &index, ULONG_MAX) : NULL)

struct idr {
	struct xarray idr_rt;
	unsigned int idr_next;
};

#define IDR_INIT { XARRAY_INIT, 0 }
int idr_alloc(struct idr *idr, void *ptr, int start, int end, gfp_t gfp);
int idr_alloc_cyclic(struct idr *idr, void *ptr, int start, int end, gfp_t gfp);
void *idr_find(struct idr *idr, unsigned long id);
void *idr_remove(struct idr *idr, unsigned long id);
void *idr_replace(struct idr *idr, void *ptr, unsigned long id);
void idr_destroy(struct idr *idr);

#endif
