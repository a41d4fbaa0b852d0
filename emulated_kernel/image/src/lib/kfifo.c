// SPDX-License-Identifier: GPL-2.0-or-later
// Rings of elements between one that puts in and one that takes out.
#include "kfifo.h"
#include "errno.h"
#include "mm.h"
#include "printk.h"
#include "string.h"

int __kfifo_init(struct __kfifo *fifo, void *buffer, unsigned int size, size_t esize)
{
	size /= esize;
	if (size < 2)
		return -EINVAL;
	size = 1U << (31 - __builtin_clz(size));
	*fifo = (struct __kfifo){ .mask = size - 1, .esize = (unsigned int)esize, .data = buffer };
	return 0;
}

int __kfifo_alloc(struct __kfifo *fifo, unsigned int size, size_t esize, gfp_t gfp_mask)
{
	void *buffer = kmalloc(size * esize, gfp_mask);
	int error = buffer ? __kfifo_init(fifo, buffer, size * esize, esize) : -ENOMEM;

	if (error)
		kfree(buffer);
	return error;
}

void __kfifo_free(struct __kfifo *fifo)
{
	kfree(fifo->data);
	*fifo = (struct __kfifo){ .data = NULL };
}

static void kfifo_copy(const struct __kfifo *fifo, void *buf, unsigned int len, unsigned int off,
		       bool in)
{
	unsigned int size = (fifo->mask + 1) * fifo->esize, first;
	char *data = fifo->data, *other = buf;

	off = (off & fifo->mask) * fifo->esize;
	len *= fifo->esize;
	first = min(len, size - off);
	if (in) {
		memcpy(data + off, other, first);
		memcpy(data, other + first, len - first);
	} else {
		memcpy(other, data + off, first);
		memcpy(other + first, data, len - first);
	}
}

unsigned int __kfifo_in(struct __kfifo *fifo, const void *buf, unsigned int len)
{
	len = min(len, fifo->mask + 1 - __kfifo_len(fifo));
	kfifo_copy(fifo, (void *)buf, len, fifo->in, true);
	fifo->in += len;
	return len;
}

unsigned int __kfifo_out_peek(struct __kfifo *fifo, void *buf, unsigned int len)
{
	len = min(len, __kfifo_len(fifo));
	kfifo_copy(fifo, buf, len, fifo->out, false);
	return len;
}

unsigned int __kfifo_out(struct __kfifo *fifo, void *buf, unsigned int len)
{
	len = __kfifo_out_peek(fifo, buf, len);
	fifo->out += len;
	return len;
}
