/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Hashes: of numbers by multiplication, of data, of data that an attacker chose; check sums. */
#ifndef _HASH_H
#define _HASH_H

#include "list.h"

#define GOLDEN_RATIO_32 0x61C88647
#define GOLDEN_RATIO_64 0x61C8864680B583EBULL

static __always_inline u32 hash_32(u32 val, unsigned int bits)
{
	return (val * GOLDEN_RATIO_32) >> (32 - bits);
}

static __always_inline u32 hash_64(u64 val, unsigned int bits)
{
	return (u32)((val * GOLDEN_RATIO_64) >> (64 - bits));
}

u32 jhash(const void *key, u32 length, u32 initval);
u32 jhash2(const u32 *k, u32 length, u32 initval);
u32 jhash_3words(u32 a, u32 b, u32 c, u32 initval);

typedef struct {
	u64 key[2];
} siphash_key_t;
u64 __siphash_unaligned(const void *data, size_t len, const siphash_key_t *key);
#define siphash(data, len, key) __siphash_unaligned(data, len, key)
u64 xxh64(const void *input, size_t length, u64 seed);
u32 xxh32(const void *input, size_t length, u32 seed);

u16 crc16(u16 crc, const u8 *buffer, size_t len);
u16 crc_ccitt(u16 crc, const u8 *buffer, size_t len);
u16 crc_itu_t(u16 crc, const u8 *buffer, size_t len);
u8 crc7_be(u8 crc, const u8 *buffer, size_t len);
u64 crc64_be(u64 crc, const void *p, size_t len);
u32 crc32c(u32 crc, const void *address, unsigned int length);

/* A table of 2^bits chains, chosen by the number that an entry is found by. */
#define DECLARE_HASHTABLE(name, bits) struct hlist_head name[1 << (bits)]
#define HASH_BITS(name) (31 - __builtin_clz(ARRAY_SIZE(name)))
#define hash_add(table, node, key) hlist_add_head(node, &(table)[hash_32(key, HASH_BITS(table))])
#define hash_del(node) hlist_del_init(node)
#define hash_for_each_possible(table, obj, member, key)                    \
	hlist_for_each_entry(obj, &(table)[hash_32(key, HASH_BITS(table))], member)

#endif
