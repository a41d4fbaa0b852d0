// SPDX-License-Identifier: GPL-2.0-or-later
// Small arithmetic: square root, greatest common divisor, least common multiple.
#include "math64.h"
#include "printk.h"
#include "string.h"

/* Each bit that a root of x can have, from the highest on, stays if the square doesn't get too big. */
unsigned long int_sqrt(unsigned long x)
{
	unsigned long bit = 1UL << (BITS_PER_LONG - 1 - __builtin_clzl(x | 1)) / 2, root = 0;

	for (; bit; bit >>= 1) {
		unsigned long more = root | bit;

		if (more * more <= x)
			root = more;
	}
	return root;
}

/* Stein's binary algorithm: powers of two that both share are counted, all others are dropped. */
unsigned long gcd(unsigned long a, unsigned long b)
{
	unsigned long bits = a | b;
	unsigned int shared = 0;

	if (!a || !b)
		return bits;
	for (; !(bits & 1); bits >>= 1)
		shared++;
	a >>= shared;
	b >>= shared;
	while (a != b) {
		if (!(a & 1))
			a >>= 1;
		else if (!(b & 1))
			b >>= 1;
		else if (a > b)
			a = (a - b) >> 1;
		else
			b = (b - a) >> 1;
	}
	return a << shared;
}

unsigned long lcm(unsigned long a, unsigned long b)
{
	return a && b ? a / gcd(a, b) * b : 0;
}

unsigned long lcm_not_zero(unsigned long a, unsigned long b)
{
	return a && b ? lcm(a, b) : a | b;
}
