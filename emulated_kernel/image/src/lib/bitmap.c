// SPDX-License-Identifier: GPL-2.0-or-later
// Bit arrays: searching, counting, combining.
#include "bitmap.h"

#define LAST_WORD_MASK(bits) (~0UL >> (-(bits) & (BITS_PER_LONG - 1)))

static __always_inline unsigned long find_next(const unsigned long *addr, unsigned long nbits,
					       unsigned long start, unsigned long invert)
{
	unsigned long word, i = start / BITS_PER_LONG;

	if (start >= nbits)
		return nbits;
	word = (addr[i] ^ invert) & (~0UL << (start % BITS_PER_LONG));
	while (!word) {
		if (++i * BITS_PER_LONG >= nbits)
			return nbits;
		word = addr[i] ^ invert;
	}
	return min(i * BITS_PER_LONG + (unsigned long)__builtin_ctzl(word), nbits);
}

unsigned long _find_next_bit(const unsigned long *addr, unsigned long nbits, unsigned long start)
{
	return find_next(addr, nbits, start, 0);
}

unsigned long _find_next_zero_bit(const unsigned long *addr, unsigned long nbits,
				  unsigned long start)
{
	return find_next(addr, nbits, start, ~0UL);
}

unsigned long _find_first_bit(const unsigned long *addr, unsigned long size)
{
	return find_next(addr, size, 0, 0);
}

unsigned long _find_first_zero_bit(const unsigned long *addr, unsigned long size)
{
	return find_next(addr, size, 0, ~0UL);
}

unsigned long _find_last_bit(const unsigned long *addr, unsigned long size)
{
	unsigned long i, word;

	for (i = DIV_ROUND_UP(size, BITS_PER_LONG); i-- > 0;) {
		word = addr[i];
		if (i == size / BITS_PER_LONG)
			word &= LAST_WORD_MASK(size);
		if (word)
			return i * BITS_PER_LONG + BITS_PER_LONG - 1 - __builtin_clzl(word);
	}
	return size;
}

unsigned int __sw_hweight32(unsigned int w)
{
	w -= (w >> 1) & 0x55555555;
	w = (w & 0x33333333) + ((w >> 2) & 0x33333333);
	w = (w + (w >> 4)) & 0x0f0f0f0f;
	return (w * 0x01010101) >> 24;
}

unsigned long __sw_hweight64(u64 w)
{
	return __sw_hweight32((unsigned int)(w >> 32)) + __sw_hweight32((unsigned int)w);
}

int __bitmap_weight(const unsigned long *bitmap, unsigned int bits)
{
	unsigned int k, lim = bits / BITS_PER_LONG;
	int w = 0;

	for (k = 0; k < lim; k++)
		w += __sw_hweight64(bitmap[k]);
	if (bits % BITS_PER_LONG)
		w += __sw_hweight64(bitmap[k] & LAST_WORD_MASK(bits));
	return w;
}

bool __bitmap_equal(const unsigned long *a, const unsigned long *b, unsigned int bits)
{
	unsigned int k, lim = bits / BITS_PER_LONG;

	for (k = 0; k < lim; k++)
		if (a[k] != b[k])
			return false;
	return !(bits % BITS_PER_LONG) || !((a[k] ^ b[k]) & LAST_WORD_MASK(bits));
}

bool __bitmap_and(unsigned long *dst, const unsigned long *a, const unsigned long *b,
		  unsigned int bits)
{
	unsigned int k, lim = bits / BITS_PER_LONG;
	unsigned long result = 0;

	for (k = 0; k < lim; k++)
		result |= (dst[k] = a[k] & b[k]);
	if (bits % BITS_PER_LONG)
		result |= (dst[k] = a[k] & b[k] & LAST_WORD_MASK(bits));
	return result != 0;
}

void __bitmap_or(unsigned long *dst, const unsigned long *a, const unsigned long *b,
		 unsigned int bits)
{
	unsigned int k;

	for (k = 0; k < DIV_ROUND_UP(bits, (unsigned int)BITS_PER_LONG); k++)
		dst[k] = a[k] | b[k];
}

void __bitmap_xor(unsigned long *dst, const unsigned long *a, const unsigned long *b,
		  unsigned int bits)
{
	unsigned int k;

	for (k = 0; k < DIV_ROUND_UP(bits, (unsigned int)BITS_PER_LONG); k++)
		dst[k] = a[k] ^ b[k];
}

bool __bitmap_subset(const unsigned long *a, const unsigned long *b, unsigned int bits)
{
	unsigned int k, lim = bits / BITS_PER_LONG;

	for (k = 0; k < lim; k++)
		if (a[k] & ~b[k])
			return false;
	return !(bits % BITS_PER_LONG) || !(a[k] & ~b[k] & LAST_WORD_MASK(bits));
}

bool __bitmap_intersects(const unsigned long *a, const unsigned long *b, unsigned int bits)
{
	unsigned int k, lim = bits / BITS_PER_LONG;

	for (k = 0; k < lim; k++)
		if (a[k] & b[k])
			return true;
	return bits % BITS_PER_LONG && (a[k] & b[k] & LAST_WORD_MASK(bits));
}

void __bitmap_set(unsigned long *map, unsigned int start, int len)
{
	while (len-- > 0)
		__set_bit(start++, map);
}

void __bitmap_clear(unsigned long *map, unsigned int start, int len)
{
	while (len-- > 0)
		__clear_bit(start++, map);
}

bool __bitmap_andnot(unsigned long *dst, const unsigned long *a, const unsigned long *b,
		     unsigned int bits)
{
	unsigned int i;
	unsigned long result = 0;

	for (i = 0; i < bits / BITS_PER_LONG; i++)
		result |= dst[i] = a[i] & ~b[i];
	if (bits % BITS_PER_LONG)
		result |= dst[i] = a[i] & ~b[i] & (BIT(bits % BITS_PER_LONG) - 1);
	return result != 0;
}

void __bitmap_complement(unsigned long *dst, const unsigned long *src, unsigned int bits)
{
	unsigned int i;

	for (i = 0; i < (unsigned int)BITS_TO_LONGS(bits); i++)
		dst[i] = ~src[i];
}

/* Bits of a word that begins at any bit, as far as there are any. */
static unsigned long word_from(const unsigned long *src, long bit, unsigned int nbits)
{
	unsigned long word = 0;
	long i;

	for (i = 0; i < BITS_PER_LONG; i++)
		if (bit + i >= 0 && bit + i < (long)nbits && test_bit(bit + i, src))
			word |= BIT(i);
	return word;
}

void __bitmap_shift_right(unsigned long *dst, const unsigned long *src, unsigned int shift,
			  unsigned int nbits)
{
	unsigned int i;

	for (i = 0; i < (unsigned int)BITS_TO_LONGS(nbits); i++)
		dst[i] = word_from(src, (long)i * BITS_PER_LONG + shift, nbits);
}

/* From the end, as both may be the same. */
void __bitmap_shift_left(unsigned long *dst, const unsigned long *src, unsigned int shift,
			 unsigned int nbits)
{
	unsigned int i;

	for (i = BITS_TO_LONGS(nbits); i--;)
		dst[i] = word_from(src, (long)i * BITS_PER_LONG - shift, nbits);
}

/* nr zeros in a row; a result above the size: there are none. */
unsigned long bitmap_find_next_zero_area(unsigned long *map, unsigned long size, unsigned long start,
					 unsigned int nr, unsigned long align_mask)
{
	unsigned long index = start, next;

	for (;;) {
		index = (_find_next_zero_bit(map, size, index) + align_mask) & ~align_mask;
		if (index + nr > size)
			return index + nr;
		next = _find_next_bit(map, index + nr, index);
		if (next >= index + nr)
			return index;
		index = next + 1;
	}
}
