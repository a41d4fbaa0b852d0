/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The internet's checksum: sums in ones' complement of 16-bit words. */
#ifndef _CHECKSUM_H
#define _CHECKSUM_H

#include "types.h"

typedef u16 __sum16;
typedef u32 __wsum;
typedef u16 __be16;
typedef u32 __be32;

#define htons(x) ((__be16)__builtin_bswap16(x))
#define ntohs(x) __builtin_bswap16(x)
#define htonl(x) ((__be32)__builtin_bswap32(x))
#define ntohl(x) __builtin_bswap32(x)

static __always_inline __sum16 csum_fold(__wsum sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	return (__sum16)~(sum + (sum >> 16));
}

static __always_inline __wsum csum_add(__wsum csum, __wsum addend)
{
	csum += addend;
	return csum + (csum < addend);
}

__wsum csum_partial(const void *buff, int len, __wsum sum);
__sum16 ip_fast_csum(const void *iph, unsigned int ihl);
__sum16 ip_compute_csum(const void *buff, int len);
__wsum csum_tcpudp_nofold(__be32 saddr, __be32 daddr, u32 len, u8 proto, __wsum sum);
__sum16 csum_tcpudp_magic(__be32 saddr, __be32 daddr, u32 len, u8 proto, __wsum sum);

#endif
