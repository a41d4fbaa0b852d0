// SPDX-License-Identifier: GPL-2.0-or-later
// Division of 64-bit numbers, and of 128-bit products of them.
#include "math64.h"

u64 div_u64_rem(u64 dividend, u32 divisor, u32 *remainder)
{
	*remainder = (u32)(dividend % divisor);
	return dividend / divisor;
}

s64 div_s64_rem(s64 dividend, s32 divisor, s32 *remainder)
{
	*remainder = (s32)(dividend % divisor);
	return dividend / divisor;
}

u64 div64_u64_rem(u64 dividend, u64 divisor, u64 *remainder)
{
	*remainder = dividend % divisor;
	return dividend / divisor;
}

u64 div64_u64(u64 dividend, u64 divisor)
{
	return dividend / divisor;
}

s64 div64_s64(s64 dividend, s64 divisor)
{
	return dividend / divisor;
}

/* By subtraction: for quotients that are mostly 0 or 1. */
u32 iter_div_u64_rem(u64 dividend, u32 divisor, u64 *remainder)
{
	u32 ret = 0;

	while (dividend >= divisor) {
		dividend -= divisor;
		ret++;
	}
	*remainder = dividend;
	return ret;
}

static void mul_u64_u64(u64 a, u64 b, u64 *high, u64 *low)
{
	u64 ll = (a & UINT_MAX) * (b & UINT_MAX), lh = (a & UINT_MAX) * (b >> 32);
	u64 hl = (a >> 32) * (b & UINT_MAX), middle = (ll >> 32) + (lh & UINT_MAX) + hl;

	*high = (a >> 32) * (b >> 32) + (lh >> 32) + (middle >> 32);
	*low = middle << 32 | (ll & UINT_MAX);
}

/* All ones where the quotient doesn't fit. */
u64 mul_u64_u64_div_u64(u64 a, u64 b, u64 c)
{
	u64 high, low, quot = 0;
	bool carry;
	int bit;

	mul_u64_u64(a, b, &high, &low);
	if (high >= c)
		return U64_MAX;
	for (bit = 0; bit < 64; bit++) {
		carry = high >> 63;
		high = high << 1 | low >> 63;
		low <<= 1;
		quot <<= 1;
		if (carry || high >= c) {
			high -= c;
			quot |= 1;
		}
	}
	return quot;
}

u64 mul_u64_u32_shr(u64 a, u32 mul, unsigned int shift)
{
	u64 ret = ((a & UINT_MAX) * mul) >> shift;

	if (a >> 32)
		ret += ((a >> 32) * mul) << (32 - shift);
	return ret;
}

u32 int_sqrt64(u64 x)
{
	u64 bit = 1ULL << 62, root = 0;

	while (bit > x)
		bit >>= 2;
	for (; bit; bit >>= 2) {
		if (x >= root + bit) {
			x -= root + bit;
			root = (root >> 1) + bit;
		} else {
			root >>= 1;
		}
	}
	return (u32)root;
}

u64 int_pow(u64 base, unsigned int exp)
{
	u64 result = 1;

	for (; exp; exp >>= 1) {
		if (exp & 1)
			result *= base;
		base *= base;
	}
	return result;
}
