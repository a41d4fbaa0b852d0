// SPDX-License-Identifier: GPL-2.0-or-later
// Numbers given out for pointers, the lowest free one first.
#include "errno.h"
#include "xarray.h"

static unsigned long last_of(int end)
{
	return end > 0 ? (unsigned long)end - 1 : INT_MAX;
}

/* The end is the first number that isn't given; 0 or less: there is none. */
int idr_alloc(struct idr *idr, void *ptr, int start, int end, gfp_t gfp)
{
	unsigned long id = (unsigned long)start;
	void *old;

	if (start < 0 || !ptr)
		return -EINVAL;
	while (id <= last_of(end) && xa_load(&idr->idr_rt, id))
		id++;
	if (id > last_of(end))
		return -ENOSPC;
	old = xa_store(&idr->idr_rt, id, ptr, gfp);
	return IS_ERR(old) ? (int)PTR_ERR(old) : (int)id;
}

/* Goes on behind the last one that it gave, and begins anew at the end. */
int idr_alloc_cyclic(struct idr *idr, void *ptr, int start, int end, gfp_t gfp)
{
	int id = idr_alloc(idr, ptr, max(start, (int)idr->idr_next), end, gfp);

	if (id == -ENOSPC && (int)idr->idr_next > start)
		id = idr_alloc(idr, ptr, start, end, gfp);
	if (id >= 0)
		idr->idr_next = (unsigned int)id + 1;
	return id;
}

void *idr_find(struct idr *idr, unsigned long id)
{
	return xa_load(&idr->idr_rt, id);
}

void *idr_remove(struct idr *idr, unsigned long id)
{
	return xa_erase(&idr->idr_rt, id);
}

void *idr_replace(struct idr *idr, void *ptr, unsigned long id)
{
	if (!ptr)
		return ERR_PTR(-EINVAL);
	if (!xa_load(&idr->idr_rt, id))
		return ERR_PTR(-ENOENT);
	return xa_store(&idr->idr_rt, id, ptr, 0);
}

void idr_destroy(struct idr *idr)
{
	xa_destroy(&idr->idr_rt);
}
