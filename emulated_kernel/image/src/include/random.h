/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Pseudo-random numbers, each sequence from a state of its own. */
#ifndef _RANDOM_H
#define _RANDOM_H

#include "types.h"

struct rnd_state {
	u32 s1, s2, s3, s4;
};

u32 prandom_u32_state(struct rnd_state *state);
void prandom_bytes_state(struct rnd_state *state, void *buf, size_t bytes);
void prandom_seed_state(struct rnd_state *state, u64 seed);

#endif
