// SPDX-License-Identifier: GPL-2.0-or-later
// Bytes as letters: base64 without padding, in the variant for file names.
#include "string.h"

static const char base64_table[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/* Characters written; nothing ends them. */
int base64_encode(const u8 *src, int srclen, char *dst)
{
	char *cp = dst;
	u32 ac = 0;
	int i, bits = 0;

	for (i = 0; i < srclen; i++) {
		ac = ac << 8 | src[i];
		for (bits += 8; bits >= 6; bits -= 6)
			*cp++ = base64_table[(ac >> (bits - 6)) & 0x3f];
	}
	if (bits)
		*cp++ = base64_table[(ac << (6 - bits)) & 0x3f];
	return (int)(cp - dst);
}

/* Bytes written, or -1 for what no bytes become. */
int base64_decode(const char *src, int srclen, u8 *dst)
{
	u8 *bp = dst;
	u32 ac = 0;
	int i, bits = 0;

	for (i = 0; i < srclen; i++) {
		const char *p = src[i] ? strchr(base64_table, src[i]) : NULL;

		if (!p)
			return -1;
		ac = ac << 6 | (u32)(p - base64_table);
		bits += 6;
		if (bits >= 8) {
			bits -= 8;
			*bp++ = (u8)(ac >> bits);
		}
	}
	return ac & ((1U << bits) - 1) ? -1 : (int)(bp - dst);
}
