// SPDX-License-Identifier: GPL-2.0-or-later
// Small arithmetic: square root, greatest common divisor, least common multiple.
#include "math64.h"
#include "printk.h"
#include "string.h"

unsigned long int_sqrt(unsigned long x)
{
	unsigned long b, m, y = 0;

	if (x <= 1)
		return x;
	m = 1UL << ((BITS_PER_LONG - 1 - __builtin_clzl(x)) & ~1);
	while (m) {
		b = y + m;
		y >>= 1;
		if (x >= b) {
			x -= b;
			y += m;
		}
		m >>= 2;
	}
	return y;
}

unsigned long gcd(unsigned long a, unsigned long b)
{
	unsigned long r = a | b;

	if (!a || !b)
		return r;
	r &= -r;
	while (!(b & r))
		b >>= 1;
	if (b == r)
		return r;
	for (;;) {
		while (!(a & r))
			a >>= 1;
		if (a == r)
			return r;
		if (a == b)
			return a;
		if (a < b)
			swap(a, b);
		a -= b;
		a >>= 1;
		if (a & r)
			a += b;
		a >>= 1;
	}
}

unsigned long lcm(unsigned long a, unsigned long b)
{
	return a && b ? a / gcd(a, b) * b : 0;
}

unsigned long lcm_not_zero(unsigned long a, unsigned long b)
{
	unsigned long l = lcm(a, b);

	if (l)
		return l;
	return b ? b : a;
}
