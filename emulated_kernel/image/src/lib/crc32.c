// SPDX-License-Identifier: GPL-2.0-or-later
// CRC-32, both bit orders, by tables of sixteen entries.
#include "string.h"

#define CRC32_POLY_LE 0xedb88320U
#define CRC32_POLY_BE 0x04c11db7U

static __always_inline u32 le_step(u32 crc, int bits)
{
	while (bits--)
		crc = (crc >> 1) ^ (crc & 1 ? CRC32_POLY_LE : 0);
	return crc;
}

static const u32 crc32table_le[16] = {
	0x00000000, 0x1db71064, 0x3b6e20c8, 0x26d930ac, 0x76dc4190, 0x6b6b51f4,
	0x4db26158, 0x5005713c, 0xedb88320, 0xf00f9344, 0xd6d6a3e8, 0xcb61b38c,
	0x9b64c2b0, 0x86d3d2d4, 0xa00ae278, 0xbdbdf21c,
};

u32 crc32_le(u32 crc, const unsigned char *p, size_t len)
{
	while (len--) {
		crc ^= *p++;
		crc = (crc >> 4) ^ crc32table_le[crc & 15];
		crc = (crc >> 4) ^ crc32table_le[crc & 15];
	}
	return crc;
}

u32 crc32_be(u32 crc, const unsigned char *p, size_t len)
{
	int i;

	while (len--) {
		crc ^= (u32)*p++ << 24;
		for (i = 0; i < 8; i++)
			crc = (crc << 1) ^ (crc & 0x80000000 ? CRC32_POLY_BE : 0);
	}
	return crc;
}

/* The checksum of two pieces from those of each: moves crc over len zero bytes. */
u32 crc32_le_shift(u32 crc, size_t len)
{
	while (len--)
		crc = le_step(crc, 8);
	return crc;
}
