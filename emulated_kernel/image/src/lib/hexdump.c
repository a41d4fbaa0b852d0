// SPDX-License-Identifier: GPL-2.0-or-later
// Hexadecimal text to bytes and back.
#include "errno.h"
#include "string.h"

static const char hex_asc[] = "0123456789abcdef";

int hex_to_bin(unsigned char ch)
{
	if (isdigit(ch))
		return ch - '0';
	ch = tolower(ch);
	return ch >= 'a' && ch <= 'f' ? ch - 'a' + 10 : -1;
}

int hex2bin(u8 *dst, const char *src, size_t count)
{
	int hi, lo;

	while (count--) {
		hi = hex_to_bin(*src++);
		if (hi < 0)
			return -EINVAL;
		lo = hex_to_bin(*src++);
		if (lo < 0)
			return -EINVAL;
		*dst++ = (u8)(hi << 4 | lo);
	}
	return 0;
}

char *bin2hex(char *dst, const void *src, size_t count)
{
	const unsigned char *s = src;

	while (count--) {
		*dst++ = hex_asc[*s >> 4];
		*dst++ = hex_asc[*s++ & 15];
	}
	return dst;
}
