// SPDX-License-Identifier: GPL-2.0-or-later
// Sums of packets, as they stand in memory.
#include "checksum.h"

static u32 from64to32(u64 x)
{
	x = (x & UINT_MAX) + (x >> 32);
	x = (x & UINT_MAX) + (x >> 32);
	return (u32)x;
}

static noinline u32 do_csum(const u8 *buff, int len)
{
	u64 result = 0;

	for (; len >= 2; len -= 2, buff += 2)
		result += buff[0] | (u32)buff[1] << 8;
	if (len)
		result += *buff;
	return from64to32(result);
}

__wsum csum_partial(const void *buff, int len, __wsum sum)
{
	return csum_add(do_csum(buff, len), sum);
}

__sum16 ip_fast_csum(const void *iph, unsigned int ihl)
{
	return csum_fold(do_csum(iph, (int)ihl * 4));
}

__sum16 ip_compute_csum(const void *buff, int len)
{
	return csum_fold(do_csum(buff, len));
}

/* With the pseudo header of TCP and UDP. */
__wsum csum_tcpudp_nofold(__be32 saddr, __be32 daddr, u32 len, u8 proto, __wsum sum)
{
	u64 s = (u64)sum + saddr + daddr + htonl(proto) + htonl(len);

	return from64to32(s);
}

__sum16 csum_tcpudp_magic(__be32 saddr, __be32 daddr, u32 len, u8 proto, __wsum sum)
{
	return csum_fold(csum_tcpudp_nofold(saddr, daddr, len, proto, sum));
}
