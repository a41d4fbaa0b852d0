// SPDX-License-Identifier: GPL-2.0-or-later
// 64-bit division, which the compiler calls by these names on i386.
#include "types.h"

u64 __udivmoddi4(u64 num, u64 den, u64 *rem);
s64 __divmoddi4(s64 num, s64 den, s64 *rem);
u64 __udivdi3(u64 num, u64 den);
u64 __umoddi3(u64 num, u64 den);
s64 __divdi3(s64 num, s64 den);
s64 __moddi3(s64 num, s64 den);

/* Two words by one word: both steps fit the machine's division. */
static __always_inline u64 div_by_word(u64 num, u32 den, u64 *rem)
{
	u32 high = (u32)(num >> 32), quot_high = high / den, quot_low, rest = high % den;

	__asm__("divl %4" : "=a"(quot_low), "=d"(rest) : "a"((u32)num), "d"(rest), "rm"(den));
	*rem = rest;
	return (u64)quot_high << 32 | quot_low;
}

/* Bit by bit; the quotient has at most 32 of them, as the divisor has more than that. */
static __always_inline u64 div_by_long(u64 num, u64 den, u64 *rem)
{
	int shift = __builtin_clz((u32)(den >> 32)) - (num >> 32 ? __builtin_clz((u32)(num >> 32)) : 32);
	u64 quot = 0;

	for (; shift >= 0; shift--) {
		quot <<= 1;
		if (num >= den << shift) {
			num -= den << shift;
			quot |= 1;
		}
	}
	*rem = num;
	return quot;
}

u64 __udivmoddi4(u64 num, u64 den, u64 *rem)
{
	return den >> 32 ? div_by_long(num, den, rem) : div_by_word(num, (u32)den, rem);
}

s64 __divmoddi4(s64 num, s64 den, s64 *rem)
{
	u64 rest, quot = __udivmoddi4(num < 0 ? -(u64)num : (u64)num, den < 0 ? -(u64)den : (u64)den, &rest);

	*rem = (s64)(num < 0 ? -rest : rest);
	return (s64)((num < 0) != (den < 0) ? -quot : quot);
}

u64 __udivdi3(u64 num, u64 den)
{
	u64 rem;

	return __udivmoddi4(num, den, &rem);
}

u64 __umoddi3(u64 num, u64 den)
{
	u64 rem;

	__udivmoddi4(num, den, &rem);
	return rem;
}

s64 __divdi3(s64 num, s64 den)
{
	s64 rem;

	return __divmoddi4(num, den, &rem);
}

s64 __moddi3(s64 num, s64 den)
{
	s64 rem;

	__divmoddi4(num, den, &rem);
	return rem;
}
