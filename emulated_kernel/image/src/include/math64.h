/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Division of 64-bit numbers, roots, powers. */
#ifndef _MATH64_H
#define _MATH64_H

#include "types.h"

u64 div_u64_rem(u64 dividend, u32 divisor, u32 *remainder);
s64 div_s64_rem(s64 dividend, s32 divisor, s32 *remainder);
u64 div64_u64_rem(u64 dividend, u64 divisor, u64 *remainder);
u64 div64_u64(u64 dividend, u64 divisor);
s64 div64_s64(s64 dividend, s64 divisor);
u64 mul_u64_u64_div_u64(u64 a, u64 b, u64 c);
u64 mul_u64_u32_shr(u64 a, u32 mul, unsigned int shift);
u32 iter_div_u64_rem(u64 dividend, u32 divisor, u64 *remainder);
unsigned long lcm_not_zero(unsigned long a, unsigned long b);
u32 int_sqrt64(u64 x);
u64 int_pow(u64 base, unsigned int exp);
unsigned int bcd2bin(unsigned char val);
unsigned char bin2bcd(unsigned int val);
u8 bitrev8(u8 byte);
u32 bitrev32(u32 x);
unsigned long roundup_pow_of_two(unsigned long n);
unsigned int ilog2_u32(u32 n);

struct reciprocal_value {
	u32 m;
	u8 sh1, sh2;
};
struct reciprocal_value reciprocal_value(u32 d);
u32 reciprocal_divide(u32 a, struct reciprocal_value r);

#endif
