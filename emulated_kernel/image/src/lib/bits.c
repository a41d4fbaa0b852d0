// SPDX-License-Identifier: GPL-2.0-or-later
// Numbers in other clothes: decimal in nibbles, reversed, rounded, multiplied instead of divided.
#include "math64.h"

unsigned int bcd2bin(unsigned char val)
{
	return (val & 0x0fU) + (val >> 4) * 10;
}

unsigned char bin2bcd(unsigned int val)
{
	return (unsigned char)((val / 10) << 4 | val % 10);
}

u8 bitrev8(u8 byte)
{
	byte = (u8)(byte >> 4 | byte << 4);
	byte = (u8)((byte & 0xcc) >> 2 | (byte & 0x33) << 2);
	return (u8)((byte & 0xaa) >> 1 | (byte & 0x55) << 1);
}

u32 bitrev32(u32 x)
{
	return (u32)bitrev8((u8)x) << 24 | (u32)bitrev8((u8)(x >> 8)) << 16 |
	       (u32)bitrev8((u8)(x >> 16)) << 8 | bitrev8((u8)(x >> 24));
}

unsigned int ilog2_u32(u32 n)
{
	return 31 - (unsigned int)__builtin_clz(n | 1);
}

unsigned long roundup_pow_of_two(unsigned long n)
{
	return n <= 1 ? 1 : 1UL << (BITS_PER_LONG - __builtin_clzl(n - 1));
}

/* Granlund and Montgomery, 1994, figure 4.1: exact for each dividend of 32 bits. */
struct reciprocal_value reciprocal_value(u32 d)
{
	int l = d > 1 ? 32 - __builtin_clz(d - 1) : 0;
	u64 m = (((1ULL << 32) * ((1ULL << l) - d)) / d) + 1;

	return (struct reciprocal_value){ (u32)m, (u8)min(l, 1), (u8)max(l - 1, 0) };
}

u32 reciprocal_divide(u32 a, struct reciprocal_value r)
{
	u32 t = (u32)(((u64)a * r.m) >> 32);

	return (t + ((a - t) >> r.sh1)) >> r.sh2;
}
