/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Bit arrays of longs. */
#ifndef _BITMAP_H
#define _BITMAP_H

#include "types.h"

#define BITS_TO_LONGS(n) DIV_ROUND_UP(n, 8 * (int)sizeof(long))
#define DECLARE_BITMAP(name, bits) unsigned long name[BITS_TO_LONGS(bits)]

static __always_inline void __set_bit(unsigned long nr, unsigned long *addr)
{
	addr[nr / BITS_PER_LONG] |= BIT(nr % BITS_PER_LONG);
}

static __always_inline void __clear_bit(unsigned long nr, unsigned long *addr)
{
	addr[nr / BITS_PER_LONG] &= ~BIT(nr % BITS_PER_LONG);
}

static __always_inline bool test_bit(unsigned long nr, const unsigned long *addr)
{
	return (addr[nr / BITS_PER_LONG] >> (nr % BITS_PER_LONG)) & 1;
}

unsigned long _find_first_bit(const unsigned long *addr, unsigned long size);
unsigned long _find_first_zero_bit(const unsigned long *addr, unsigned long size);
unsigned long _find_next_bit(const unsigned long *addr, unsigned long nbits, unsigned long start);
unsigned long _find_next_zero_bit(const unsigned long *addr, unsigned long nbits,
				  unsigned long start);
unsigned long _find_last_bit(const unsigned long *addr, unsigned long size);
#define find_first_bit _find_first_bit
#define find_next_bit _find_next_bit
#define find_next_zero_bit _find_next_zero_bit

bool __bitmap_equal(const unsigned long *a, const unsigned long *b, unsigned int bits);
bool __bitmap_and(unsigned long *dst, const unsigned long *a, const unsigned long *b,
		  unsigned int bits);
void __bitmap_or(unsigned long *dst, const unsigned long *a, const unsigned long *b,
		 unsigned int bits);
void __bitmap_xor(unsigned long *dst, const unsigned long *a, const unsigned long *b,
		  unsigned int bits);
bool __bitmap_subset(const unsigned long *a, const unsigned long *b, unsigned int bits);
bool __bitmap_intersects(const unsigned long *a, const unsigned long *b, unsigned int bits);
int __bitmap_weight(const unsigned long *bitmap, unsigned int bits);
bool __bitmap_andnot(unsigned long *dst, const unsigned long *a, const unsigned long *b,
		     unsigned int bits);
void __bitmap_complement(unsigned long *dst, const unsigned long *src, unsigned int bits);
void __bitmap_shift_right(unsigned long *dst, const unsigned long *src, unsigned int shift,
			  unsigned int nbits);
void __bitmap_shift_left(unsigned long *dst, const unsigned long *src, unsigned int shift,
			 unsigned int nbits);
unsigned long bitmap_find_next_zero_area(unsigned long *map, unsigned long size, unsigned long start,
					 unsigned int nr, unsigned long align_mask);
void __bitmap_set(unsigned long *map, unsigned int start, int len);
void __bitmap_clear(unsigned long *map, unsigned int start, int len);
unsigned int __sw_hweight32(unsigned int w);
unsigned long __sw_hweight64(u64 w);

#endif
