/* SPDX-License-Identifier: GPL-2.0-or-later */
/* A ring of elements, as many as a power of two; counters run freely. */
#ifndef _KFIFO_H
#define _KFIFO_H

#include "types.h"

struct __kfifo {
	unsigned int in, out;
	unsigned int mask;
	unsigned int esize;
	void *data;
};

int __kfifo_init(struct __kfifo *fifo, void *buffer, unsigned int size, size_t esize);
int __kfifo_alloc(struct __kfifo *fifo, unsigned int size, size_t esize, gfp_t gfp_mask);
void __kfifo_free(struct __kfifo *fifo);
unsigned int __kfifo_in(struct __kfifo *fifo, const void *buf, unsigned int len);
unsigned int __kfifo_out(struct __kfifo *fifo, void *buf, unsigned int len);
unsigned int __kfifo_out_peek(struct __kfifo *fifo, void *buf, unsigned int len);

static __always_inline unsigned int __kfifo_len(const struct __kfifo *fifo)
{
	return fifo->in - fifo->out;
}

#endif
