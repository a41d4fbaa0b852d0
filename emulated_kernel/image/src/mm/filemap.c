// SPDX-License-Identifier: GPL-2.0-or-later
// The page cache of ramfs files: pages by index, and reading and writing through them.
#include "atomic.h"
#include "bug.h"
#include "errno.h"
#include "fs.h"
#include "mm.h"
#include "printk.h"
#include "string.h"
#include "tracepoint.h"

atomic_t nr_file_pages;
/* How many there may be. The host writes it, for machine/limits. */
unsigned long max_file_pages = ULONG_MAX;

/* Whoever holds the inode's lock finds it unchanged. */
static __always_inline struct page *find_page(struct address_space *mapping, unsigned long index)
{
	return index < mapping->nr_slots ? mapping->pages[index] : NULL;
}

/* With a reference, for it may be truncated while it is read. */
static struct page *find_get_page(struct address_space *mapping, unsigned long index)
{
	struct page *page;

	spin_lock(&mapping->i_pages_lock);
	page = find_page(mapping, index);
	if (page)
		atomic_inc(&page->_refcount);
	spin_unlock(&mapping->i_pages_lock);
	return page;
}

static noinline int mapping_expand(struct address_space *mapping, unsigned long index)
{
	unsigned long slots = max(mapping->nr_slots * 2, 4UL);
	struct page **pages;

	while (slots <= index)
		slots *= 2;
	if (!file_pages_left(DIV_ROUND_UP(slots * sizeof(*pages), PAGE_SIZE)))
		return -ENOSPC;
	pages = krealloc(mapping->pages, slots * sizeof(*pages), GFP_KERNEL | __GFP_NOWARN);
	if (!pages)
		return -ENOSPC;
	memset(pages + mapping->nr_slots, 0, (slots - mapping->nr_slots) * sizeof(*pages));
	mapping->pages = pages;
	mapping->nr_slots = slots;
	return 0;
}

static noinline int add_to_page_cache(struct page *page, struct address_space *mapping,
				      unsigned long index)
{
	int err = 0;

	spin_lock(&mapping->i_pages_lock);
	if (index >= mapping->nr_slots)
		err = mapping_expand(mapping, index);
	if (!err) {
		page->index = index;
		mapping->pages[index] = page;
		mapping->nrpages++;
		atomic_inc(&nr_file_pages);
	}
	spin_unlock(&mapping->i_pages_lock);
	if (!err)
		trace_mm_filemap_add_to_page_cache(page, mapping->host);
	return err;
}

/* The page at index, made if it is a hole; NULL: no memory. */
static struct page *grab_cache_page(struct address_space *mapping, unsigned long index)
{
	struct page *page = find_page(mapping, index);

	if (page)
		return page;
	if (!file_pages_left(1) || (unsigned int)atomic_read(&nr_file_pages) >= max_file_pages)
		return NULL;
	page = alloc_page(GFP_KERNEL | __GFP_ZERO | __GFP_NOWARN);
	if (!page)
		return NULL;
	if (add_to_page_cache(page, mapping, index)) {
		put_page(page);
		return NULL;
	}
	return page;
}

ssize_t filemap_read(struct kiocb *iocb, struct iov_iter *iter, ssize_t already_read)
{
	struct inode *inode = iocb->ki_filp->f_inode;
	loff_t isize = i_size_read(inode);
	size_t offset, bytes, copied;
	struct page *page;

	while (iter->count && iocb->ki_pos < isize) {
		offset = iocb->ki_pos & (PAGE_SIZE - 1);
		bytes = min_t(u64, PAGE_SIZE - offset, isize - iocb->ki_pos);
		bytes = min(bytes, iter->count);
		page = find_get_page(inode->i_mapping, iocb->ki_pos >> PAGE_SHIFT);
		if (page) {
			copied = copy_to_iter((char *)page_address(page) + offset, bytes, iter);
			put_page(page);
		} else {
			copied = iov_iter_zero(bytes, iter);
		}
		iocb->ki_pos += copied;
		already_read += copied;
		if (copied < bytes)
			return already_read ? already_read : -EFAULT;
	}
	return already_read;
}

ssize_t generic_file_read_iter(struct kiocb *iocb, struct iov_iter *iter)
{
	ssize_t ret;

	if (!iter->count)
		return 0;
	ret = filemap_read(iocb, iter, 0);
	touch_atime(&iocb->ki_filp->f_path);
	return ret;
}

static noinline int generic_write_checks(struct kiocb *iocb, struct iov_iter *from)
{
	struct inode *inode = iocb->ki_filp->f_inode;
	loff_t max_bytes = inode->i_sb->s_maxbytes;

	if (!from->count)
		return 0;
	if (iocb->ki_filp->f_flags & O_APPEND)
		iocb->ki_pos = i_size_read(inode);
	if (iocb->ki_pos >= max_bytes)
		return -EFBIG;
	from->count = min_t(u64, from->count, max_bytes - iocb->ki_pos);
	return 1;
}

ssize_t generic_perform_write(struct kiocb *iocb, struct iov_iter *i)
{
	struct inode *inode = iocb->ki_filp->f_inode;
	size_t offset, bytes, copied;
	ssize_t written = 0;
	struct page *page;

	while (i->count) {
		offset = iocb->ki_pos & (PAGE_SIZE - 1);
		bytes = min(PAGE_SIZE - offset, i->count);
		page = grab_cache_page(inode->i_mapping, iocb->ki_pos >> PAGE_SHIFT);
		if (!page)
			return written ? written : -ENOSPC;
		copied = copy_from_iter((char *)page_address(page) + offset, bytes, i);
		iocb->ki_pos += copied;
		written += copied;
		if (iocb->ki_pos > inode->i_size)
			inode->i_size = iocb->ki_pos;
		if (copied < bytes)
			return written ? written : -EFAULT;
		cond_resched();
	}
	return written;
}

ssize_t __generic_file_write_iter(struct kiocb *iocb, struct iov_iter *from)
{
	int err = file_update_time(iocb->ki_filp);

	return err ? err : generic_perform_write(iocb, from);
}

ssize_t generic_file_write_iter(struct kiocb *iocb, struct iov_iter *from)
{
	struct inode *inode = iocb->ki_filp->f_inode;
	ssize_t ret;

	inode_lock(inode);
	ret = generic_write_checks(iocb, from);
	if (ret > 0)
		ret = __generic_file_write_iter(iocb, from);
	inode_unlock(inode);
	return ret;
}

static noinline void delete_from_page_cache(struct address_space *mapping, unsigned long index)
{
	struct page *page = mapping->pages[index];

	spin_lock(&mapping->i_pages_lock);
	trace_mm_filemap_delete_from_page_cache(page, mapping->host);
	mapping->pages[index] = NULL;
	mapping->nrpages--;
	spin_unlock(&mapping->i_pages_lock);
	atomic_dec(&nr_file_pages);
	put_page(page);
}

static void truncate_inode_pages(struct address_space *mapping, loff_t lstart)
{
	unsigned long index = DIV_ROUND_UP((u64)lstart, PAGE_SIZE);
	struct page *page;
	size_t offset = lstart & (PAGE_SIZE - 1);

	page = find_page(mapping, lstart >> PAGE_SHIFT);
	if (offset && page)
		memset((char *)page_address(page) + offset, 0, PAGE_SIZE - offset);
	for (; index < mapping->nr_slots; index++)
		if (mapping->pages[index])
			delete_from_page_cache(mapping, index);
}

void truncate_pagecache(struct inode *inode, loff_t newsize)
{
	truncate_inode_pages(inode->i_mapping, newsize);
}

void truncate_inode_pages_final(struct address_space *mapping)
{
	truncate_inode_pages(mapping, 0);
	WARN_ON(mapping->nrpages);
	kfree(mapping->pages);
	mapping->pages = NULL;
	mapping->nr_slots = 0;
}
