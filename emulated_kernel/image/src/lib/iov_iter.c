// SPDX-License-Identifier: GPL-2.0-or-later
// The user or kernel buffer that a read or write goes through.
#include "fs.h"
#include "mm.h"
#include "printk.h"
#include "string.h"
#include "uaccess.h"

void iov_iter_ubuf(struct iov_iter *i, bool source, void __user *buf, size_t count)
{
	*i = (struct iov_iter){ .data_source = source, .user = true, .count = count, .ubuf = buf };
}

void iov_iter_kbuf(struct iov_iter *i, bool source, void *buf, size_t count)
{
	*i = (struct iov_iter){ .data_source = source, .user = false, .count = count, .kbuf = buf };
}

static size_t iov_iter_advance(struct iov_iter *i, size_t bytes)
{
	i->count -= bytes;
	i->ubuf = (char *)i->ubuf + bytes;
	return bytes;
}

static size_t copyout(void __user *to, const void *from, size_t n)
{
	return copy_to_user(to, from, n);
}

static size_t copyin(void *to, const void __user *from, size_t n)
{
	return copy_from_user(to, from, n);
}

size_t copy_to_iter(const void *addr, size_t bytes, struct iov_iter *i)
{
	size_t left = 0;

	bytes = min(bytes, i->count);
	if (i->user)
		left = copyout(i->ubuf, addr, bytes);
	else
		memcpy(i->kbuf, addr, bytes);
	return iov_iter_advance(i, bytes - left);
}

size_t copy_from_iter(void *addr, size_t bytes, struct iov_iter *i)
{
	size_t left = 0;

	bytes = min(bytes, i->count);
	if (i->user)
		left = copyin(addr, i->ubuf, bytes);
	else
		memcpy(addr, i->kbuf, bytes);
	return iov_iter_advance(i, bytes - left);
}

size_t copy_page_to_iter(struct page *page, size_t offset, size_t bytes, struct iov_iter *i)
{
	return copy_to_iter((char *)page_address(page) + offset, bytes, i);
}

size_t copy_page_from_iter(struct page *page, size_t offset, size_t bytes, struct iov_iter *i)
{
	return copy_from_iter((char *)page_address(page) + offset, bytes, i);
}

size_t iov_iter_zero(size_t bytes, struct iov_iter *i)
{
	size_t left = 0;

	bytes = min(bytes, i->count);
	if (i->user)
		left = clear_user(i->ubuf, bytes);
	else
		memset(i->kbuf, 0, bytes);
	return iov_iter_advance(i, bytes - left);
}
