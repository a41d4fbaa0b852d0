// SPDX-License-Identifier: GPL-2.0-or-later
// SipHash-2-4: a keyed hash that nobody without the key can make collide.
#include "hash.h"

static __always_inline u64 rol64(u64 word, unsigned int shift)
{
	return word << shift | word >> (64 - shift);
}

static __always_inline u64 load_le64(const u8 *p, size_t len)
{
	u64 word = 0;
	size_t i;

	for (i = 0; i < len; i++)
		word |= (u64)p[i] << 8 * i;
	return word;
}

static noinline void sip_rounds(u64 *v, int rounds)
{
	while (rounds--) {
		v[0] += v[1];
		v[2] += v[3];
		v[1] = rol64(v[1], 13) ^ v[0];
		v[3] = rol64(v[3], 16) ^ v[2];
		v[0] = rol64(v[0], 32) + v[3];
		v[2] += v[1];
		v[1] = rol64(v[1], 17) ^ v[2];
		v[3] = rol64(v[3], 21) ^ v[0];
		v[2] = rol64(v[2], 32);
	}
}

static __always_inline void sip_word(u64 *v, u64 word)
{
	v[3] ^= word;
	sip_rounds(v, 2);
	v[0] ^= word;
}

u64 __siphash_unaligned(const void *data, size_t len, const siphash_key_t *key)
{
	/* "somepseudorandomlygeneratedbytes" */
	u64 v[4] = { 0x736f6d6570736575ULL, 0x646f72616e646f6dULL,
		     0x6c7967656e657261ULL, 0x7465646279746573ULL };
	const u8 *p = data;
	size_t left;
	int i;

	for (i = 0; i < 4; i++)
		v[i] ^= key->key[i & 1];
	for (left = len; left >= 8; left -= 8, p += 8)
		sip_word(v, load_le64(p, 8));
	sip_word(v, (u64)len << 56 | load_le64(p, left));
	v[2] ^= 0xff;
	sip_rounds(v, 4);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}
