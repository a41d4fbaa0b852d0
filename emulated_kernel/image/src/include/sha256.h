/* SPDX-License-Identifier: GPL-2.0-or-later */
/* SHA-256 of a stream of bytes. */
#ifndef _SHA256_H
#define _SHA256_H

#include "types.h"

struct sha256_state {
	u32 state[8];
	u64 count; /* bytes so far */
	u8 buf[64];
};

void sha256_init(struct sha256_state *sctx);
void sha256_update(struct sha256_state *sctx, const u8 *data, unsigned int len);
void sha256_final(struct sha256_state *sctx, u8 *out);
void sha256(const u8 *data, unsigned int len, u8 *out);

#endif
