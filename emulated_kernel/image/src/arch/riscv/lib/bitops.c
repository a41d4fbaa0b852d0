// SPDX-License-Identifier: GPL-2.0-or-later
// Bit counting and byte swapping that the compiler calls for: the instruction set has none.
#include "types.h"

int __clzdi2(u64 val);
int __ctzdi2(u64 val);
int __popcountdi2(u64 val);
u32 __bswapsi2(u32 val);
u64 __bswapdi2(u64 val);

int __clzdi2(u64 val)
{
	int zeros = 0, step;

	for (step = 32; step; step >>= 1) {
		if (val >> (64 - step))
			continue;
		zeros += step;
		val <<= step;
	}
	return zeros;
}

int __ctzdi2(u64 val)
{
	return 63 - __clzdi2(val & -val);
}

int __popcountdi2(u64 val)
{
	val -= val >> 1 & 0x5555555555555555ULL;
	val = (val & 0x3333333333333333ULL) + (val >> 2 & 0x3333333333333333ULL);
	val = (val + (val >> 4)) & 0x0f0f0f0f0f0f0f0fULL;
	return (int)(val * 0x0101010101010101ULL >> 56);
}

u32 __bswapsi2(u32 val)
{
	val = (val & 0x00ff00ff) << 8 | (val >> 8 & 0x00ff00ff);
	return val << 16 | val >> 16;
}

u64 __bswapdi2(u64 val)
{
	return (u64)__bswapsi2((u32)val) << 32 | __bswapsi2((u32)(val >> 32));
}
