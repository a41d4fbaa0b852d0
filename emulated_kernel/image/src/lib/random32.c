// SPDX-License-Identifier: GPL-2.0-or-later
// Pseudo-random numbers: four shift registers combined (L'Ecuyer's Tausworthe generator, 1999).
#include "random.h"

static u32 tausworthe(u32 s, unsigned int a, unsigned int b, u32 c, unsigned int d)
{
	return (s & c) << d ^ ((s << a) ^ s) >> b;
}

u32 prandom_u32_state(struct rnd_state *state)
{
	state->s1 = tausworthe(state->s1, 6, 13, 4294967294U, 18);
	state->s2 = tausworthe(state->s2, 2, 27, 4294967288U, 2);
	state->s3 = tausworthe(state->s3, 13, 21, 4294967280U, 7);
	state->s4 = tausworthe(state->s4, 3, 12, 4294967168U, 13);
	return state->s1 ^ state->s2 ^ state->s3 ^ state->s4;
}

void prandom_bytes_state(struct rnd_state *state, void *buf, size_t bytes)
{
	u8 *p = buf;
	u32 word = 0;
	size_t i;

	for (i = 0; i < bytes; i++, word >>= 8) {
		if (i % 4 == 0)
			word = prandom_u32_state(state);
		p[i] = (u8)word;
	}
}

static u32 seed_of(u32 x, u32 least)
{
	return x < least ? x + least : x;
}

void prandom_seed_state(struct rnd_state *state, u64 seed)
{
	u32 i = (u32)(seed >> 32 ^ seed << 10 ^ seed);

	state->s1 = seed_of(i, 2);
	state->s2 = seed_of(i, 8);
	state->s3 = seed_of(i, 16);
	state->s4 = seed_of(i, 128);
}
