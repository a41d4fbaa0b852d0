// SPDX-License-Identifier: GPL-2.0-or-later
// xxHash, a fast hash of data in lanes that don't wait for one another.
#include "hash.h"
#include "string.h"

#define P32_1 2654435761U
#define P32_2 2246822519U
#define P32_3 3266489917U
#define P32_4 668265263U
#define P32_5 374761393U
#define P64_1 11400714785074694791ULL
#define P64_2 14029467366897019727ULL
#define P64_3 1609587929392839161ULL
#define P64_4 9650029242287828579ULL
#define P64_5 2870177450012600261ULL

#define rol(word, shift) ((word) << (shift) | (word) >> (8 * sizeof(word) - (shift)))

static u32 get32(const u8 *p)
{
	return p[0] | (u32)p[1] << 8 | (u32)p[2] << 16 | (u32)p[3] << 24;
}

static u64 get64(const u8 *p)
{
	return get32(p) | (u64)get32(p + 4) << 32;
}

static u32 round32(u32 acc, u32 input)
{
	acc += input * P32_2;
	return rol(acc, 13) * P32_1;
}

static u64 round64(u64 acc, u64 input)
{
	acc += input * P64_2;
	return rol(acc, 31) * P64_1;
}

u32 xxh32(const void *input, size_t length, u32 seed)
{
	u32 lanes[4] = { seed + P32_1 + P32_2, seed + P32_2, seed, seed - P32_1 }, hash;
	const u8 *p = input, *end = p + length;
	int i;

	if (length < 16) {
		hash = seed + P32_5;
	} else {
		for (; end - p >= 16; p += 16)
			for (i = 0; i < 4; i++)
				lanes[i] = round32(lanes[i], get32(p + 4 * i));
		hash = rol(lanes[0], 1) + rol(lanes[1], 7) + rol(lanes[2], 12) + rol(lanes[3], 18);
	}
	hash += (u32)length;
	for (; end - p >= 4; p += 4) {
		hash += get32(p) * P32_3;
		hash = rol(hash, 17) * P32_4;
	}
	for (; p < end; p++) {
		hash += *p * P32_5;
		hash = rol(hash, 11) * P32_1;
	}
	hash = (hash ^ hash >> 15) * P32_2;
	hash = (hash ^ hash >> 13) * P32_3;
	return hash ^ hash >> 16;
}

static u64 lanes64(const u8 **p, const u8 *end, u64 seed)
{
	u64 lanes[4] = { seed + P64_1 + P64_2, seed + P64_2, seed, seed - P64_1 }, hash;
	int i;

	for (; end - *p >= 32; *p += 32)
		for (i = 0; i < 4; i++)
			lanes[i] = round64(lanes[i], get64(*p + 8 * i));
	hash = rol(lanes[0], 1) + rol(lanes[1], 7) + rol(lanes[2], 12) + rol(lanes[3], 18);
	for (i = 0; i < 4; i++)
		hash = (hash ^ round64(0, lanes[i])) * P64_1 + P64_4;
	return hash;
}

u64 xxh64(const void *input, size_t length, u64 seed)
{
	const u8 *p = input, *end = p + length;
	u64 hash = length < 32 ? seed + P64_5 : lanes64(&p, end, seed);

	hash += length;
	for (; end - p >= 8; p += 8) {
		hash ^= round64(0, get64(p));
		hash = rol(hash, 27) * P64_1 + P64_4;
	}
	if (end - p >= 4) {
		hash ^= get32(p) * P64_1;
		hash = rol(hash, 23) * P64_2 + P64_3;
		p += 4;
	}
	for (; p < end; p++) {
		hash ^= *p * P64_5;
		hash = rol(hash, 11) * P64_1;
	}
	hash = (hash ^ hash >> 33) * P64_2;
	hash = (hash ^ hash >> 29) * P64_3;
	return hash ^ hash >> 32;
}
