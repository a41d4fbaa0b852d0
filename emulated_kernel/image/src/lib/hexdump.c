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

/* A group of bytes as one number of the machine: the last byte comes first. */
static int dump_group(const u8 *p, int groupsize, char *to)
{
	int i;

	for (i = groupsize; i--;) {
		*to++ = hex_asc[p[i] >> 4];
		*to++ = hex_asc[p[i] & 15];
	}
	return 2 * groupsize;
}

static void dump_text(const u8 *p, size_t len, char *line, size_t *at)
{
	while (len--) {
		line[(*at)++] = isprint(*p) && *p < 0x80 ? (char)*p : '.';
		p++;
	}
}

/*
 * A line of a dump: at most rowsize (16 or 32) bytes in groups of 1, 2, 4 or 8, and as text. Returns how long
 * the line is, or would be with more room.
 */
int hex_dump_to_buffer(const void *buf, size_t len, int rowsize, int groupsize, char *linebuf,
		       size_t linebuflen, bool ascii)
{
	char line[32 * 3 + 2 + 32 + 1];
	size_t at = 0, i, width;

	rowsize = rowsize == 32 ? 32 : 16;
	len = min(len, (size_t)rowsize);
	if ((groupsize & (groupsize - 1)) || groupsize < 1 || groupsize > 8 || len % groupsize)
		groupsize = 1;
	for (i = 0; i < len; i += groupsize) {
		at += dump_group((const u8 *)buf + i, groupsize, line + at);
		if (i + groupsize < len)
			line[at++] = ' ';
	}
	width = (size_t)rowsize * 2 + rowsize / groupsize + 1;
	if (ascii && len) {
		while (at < width)
			line[at++] = ' ';
		dump_text(buf, len, line, &at);
	}
	if (linebuflen) {
		width = min(at, linebuflen - 1);
		memcpy(linebuf, line, width);
		linebuf[width] = '\0';
	}
	return (int)at;
}
