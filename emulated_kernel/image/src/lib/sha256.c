// SPDX-License-Identifier: GPL-2.0-or-later
// SHA-256 of a stream of bytes.
#include "string.h"
#include "sha256.h"

static const u32 K[64] = {
	0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
	0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
	0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
	0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
	0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
	0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
	0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
	0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static __always_inline u32 ror32(u32 word, int shift)
{
	return word >> shift | word << (32 - shift);
}

static __always_inline u32 load_be32(const u8 *p)
{
	return (u32)p[0] << 24 | (u32)p[1] << 16 | (u32)p[2] << 8 | p[3];
}

static noinline void sha256_schedule(u32 *w, const u8 *input)
{
	u32 s0, s1;
	int i;

	for (i = 0; i < 16; i++)
		w[i] = load_be32(input + 4 * i);
	for (; i < 64; i++) {
		s0 = ror32(w[i - 15], 7) ^ ror32(w[i - 15], 18) ^ w[i - 15] >> 3;
		s1 = ror32(w[i - 2], 17) ^ ror32(w[i - 2], 19) ^ w[i - 2] >> 10;
		w[i] = w[i - 16] + s0 + w[i - 7] + s1;
	}
}

static noinline void sha256_transform(u32 *state, const u8 *input)
{
	u32 w[64], s[8], t1, t2;
	int i;

	sha256_schedule(w, input);
	memcpy(s, state, sizeof(s));
	for (i = 0; i < 64; i++) {
		t1 = s[7] + (ror32(s[4], 6) ^ ror32(s[4], 11) ^ ror32(s[4], 25)) +
		     ((s[4] & s[5]) ^ (~s[4] & s[6])) + K[i] + w[i];
		t2 = (ror32(s[0], 2) ^ ror32(s[0], 13) ^ ror32(s[0], 22)) +
		     ((s[0] & s[1]) ^ (s[0] & s[2]) ^ (s[1] & s[2]));
		memmove(s + 1, s, 7 * sizeof(*s));
		s[4] += t1;
		s[0] = t1 + t2;
	}
	for (i = 0; i < 8; i++)
		state[i] += s[i];
}

void sha256_init(struct sha256_state *sctx)
{
	static const u32 initial[8] = {
		0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
		0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
	};

	memcpy(sctx->state, initial, sizeof(initial));
	sctx->count = 0;
}

void sha256_update(struct sha256_state *sctx, const u8 *data, unsigned int len)
{
	while (len--) {
		sctx->buf[sctx->count++ % 64] = *data++;
		if (sctx->count % 64 == 0)
			sha256_transform(sctx->state, sctx->buf);
	}
}

void sha256_final(struct sha256_state *sctx, u8 *out)
{
	u64 bits = sctx->count * 8;
	u8 byte = 0x80;
	int i;

	do {
		sha256_update(sctx, &byte, 1);
		byte = 0;
	} while (sctx->count % 64 != 56);
	for (i = 56; i >= 0; i -= 8) {
		byte = (u8)(bits >> i);
		sha256_update(sctx, &byte, 1);
	}
	for (i = 0; i < 32; i++)
		out[i] = (u8)(sctx->state[i / 4] >> (24 - 8 * (i % 4)));
}

void sha256(const u8 *data, unsigned int len, u8 *out)
{
	struct sha256_state sctx;

	sha256_init(&sctx);
	sha256_update(&sctx, data, len);
	sha256_final(&sctx, out);
}
