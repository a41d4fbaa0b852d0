// SPDX-License-Identifier: GPL-2.0-or-later
// The other cyclic redundancy checks, bit by bit: polynomials reflected (low bit first) and not.
#include "hash.h"

u16 crc16(u16 crc, const u8 *buffer, size_t len)
{
	int bit;

	while (len--) {
		crc ^= *buffer++;
		for (bit = 0; bit < 8; bit++)
			crc = (u16)(crc & 1 ? crc >> 1 ^ 0xa001 : crc >> 1);
	}
	return crc;
}

u16 crc_ccitt(u16 crc, const u8 *buffer, size_t len)
{
	int bit;

	while (len--) {
		crc ^= *buffer++;
		for (bit = 0; bit < 8; bit++)
			crc = (u16)(crc & 1 ? crc >> 1 ^ 0x8408 : crc >> 1);
	}
	return crc;
}

u16 crc_itu_t(u16 crc, const u8 *buffer, size_t len)
{
	int bit;

	while (len--) {
		crc ^= (u16)(*buffer++ << 8);
		for (bit = 0; bit < 8; bit++)
			crc = (u16)(crc & 0x8000 ? crc << 1 ^ 0x1021 : crc << 1);
	}
	return crc;
}

/* Seven bits, in the upper ones of a byte. */
u8 crc7_be(u8 crc, const u8 *buffer, size_t len)
{
	int bit;

	while (len--) {
		crc ^= *buffer++;
		for (bit = 0; bit < 8; bit++)
			crc = (u8)(crc & 0x80 ? crc << 1 ^ 0x12 : crc << 1);
	}
	return crc;
}

u64 crc64_be(u64 crc, const void *p, size_t len)
{
	const u8 *buffer = p;
	int bit;

	while (len--) {
		crc ^= (u64)*buffer++ << 56;
		for (bit = 0; bit < 8; bit++)
			crc = crc >> 63 ? crc << 1 ^ 0x42f0e1eba9ea3693ULL : crc << 1;
	}
	return crc;
}

u32 crc32c(u32 crc, const void *address, unsigned int length)
{
	const u8 *buffer = address;
	int bit;

	while (length--) {
		crc ^= *buffer++;
		for (bit = 0; bit < 8; bit++)
			crc = crc & 1 ? crc >> 1 ^ 0x82f63b78U : crc >> 1;
	}
	return crc;
}
