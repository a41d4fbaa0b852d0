// SPDX-License-Identifier: GPL-2.0-or-later
// Bob Jenkins' lookup3, a hash for tables.
#include "hash.h"

#define JHASH_INITVAL 0xdeadbeef

static __always_inline u32 rol32(u32 word, unsigned int shift)
{
	return word << shift | word >> (32 - shift);
}

static const u8 mix_shifts[] = { 4, 6, 8, 16, 19, 4 };

/* Each step takes one of the words from the one before and rotates the third into it. */
static __always_inline void jhash_mix(u32 *w)
{
	unsigned int i;

	for (i = 0; i < 6; i++) {
		u32 *a = &w[i % 3], *b = &w[(i + 1) % 3], *c = &w[(i + 2) % 3];

		*a = (*a - *c) ^ rol32(*c, mix_shifts[i]);
		*c += *b;
	}
}

static const u8 final_shifts[] = { 14, 11, 25, 16, 4, 14, 24 };

static __always_inline void jhash_final(u32 *w)
{
	unsigned int i;

	for (i = 0; i < 7; i++) {
		u32 *to = &w[(i + 2) % 3], from = w[(i + 1) % 3];

		*to = (*to ^ from) - rol32(from, final_shifts[i]);
	}
}

static u32 load_le(const u8 *p, u32 len)
{
	u32 word = 0, i;

	for (i = 0; i < len && i < 4; i++)
		word |= (u32)p[i] << 8 * i;
	return word;
}

u32 jhash(const void *key, u32 length, u32 initval)
{
	const u8 *k = key;
	u32 w[3], i;

	w[0] = w[1] = w[2] = JHASH_INITVAL + length + initval;
	for (; length > 12; length -= 12, k += 12) {
		for (i = 0; i < 3; i++)
			w[i] += load_le(k + 4 * i, 4);
		jhash_mix(w);
	}
	for (i = 0; 4 * i < length; i++)
		w[i] += load_le(k + 4 * i, length - 4 * i);
	if (length)
		jhash_final(w);
	return w[2];
}

u32 jhash2(const u32 *k, u32 length, u32 initval)
{
	u32 w[3], i;

	w[0] = w[1] = w[2] = JHASH_INITVAL + (length << 2) + initval;
	for (; length > 3; length -= 3, k += 3) {
		for (i = 0; i < 3; i++)
			w[i] += k[i];
		jhash_mix(w);
	}
	for (i = 0; i < length; i++)
		w[i] += k[i];
	if (length)
		jhash_final(w);
	return w[2];
}

u32 jhash_3words(u32 a, u32 b, u32 c, u32 initval)
{
	u32 w[3] = { a, b, c }, i;

	for (i = 0; i < 3; i++)
		w[i] += JHASH_INITVAL + (3 << 2) + initval;
	jhash_final(w);
	return w[2];
}
