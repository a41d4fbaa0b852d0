// SPDX-License-Identifier: GPL-2.0-or-later
// Control messages: echoes, and what comes back instead of an answer.
#include "inet.h"
#include "mm.h"
#include "string.h"

#define ICMP_TYPES 19

static noinline void icmp_push_reply(struct sk_buff *skb, __be32 saddr, __be32 daddr)
{
	struct icmphdr *icmph = (struct icmphdr *)skb->data;

	skb_reset_transport_header(skb);
	icmph->checksum = 0;
	icmph->checksum = ip_compute_csum(icmph, (int)skb->len);
	ip_build_and_send_pkt(skb, NULL, saddr, daddr, IPPROTO_ICMP);
}

static struct sk_buff *icmp_alloc(unsigned int len)
{
	struct sk_buff *skb = alloc_skb(MAX_HEADER + len, GFP_ATOMIC);

	if (skb)
		skb_reserve(skb, MAX_HEADER);
	return skb;
}

static noinline void icmp_reply(struct sk_buff *skb_in, u8 type)
{
	const struct iphdr *iph = ip_hdr(skb_in);
	struct sk_buff *skb = icmp_alloc(skb_in->len);

	if (!skb)
		return;
	memcpy(skb_put(skb, skb_in->len), skb_in->data, skb_in->len);
	((struct icmphdr *)skb->data)->type = type;
	icmp_push_reply(skb, iph->daddr, iph->saddr);
}

/* Tells the sender of a packet why nobody took it; the header and eight bytes behind it say of which. */
void icmp_send(struct sk_buff *skb_in, int type, int code)
{
	const struct iphdr *iph = ip_hdr(skb_in);
	struct sk_buff *skb = icmp_alloc(sizeof(struct icmphdr) + sizeof(*iph) + 8);
	struct icmphdr *icmph;

	if (!skb)
		return;
	icmph = skb_put(skb, sizeof(*icmph));
	*icmph = (struct icmphdr){ .type = (u8)type, .code = (u8)code };
	memcpy(skb_put(skb, sizeof(*iph) + 8), iph, sizeof(*iph) + 8);
	icmp_push_reply(skb, iph->daddr, iph->saddr);
}

static noinline bool icmp_echo(struct sk_buff *skb)
{
	icmp_reply(skb, ICMP_ECHOREPLY);
	return false;
}

static noinline bool icmp_unreach(struct sk_buff *skb)
{
	const struct iphdr *iph;
	const struct net_protocol *ipprot;

	skb_pull(skb, sizeof(struct icmphdr));
	if (skb->len < sizeof(*iph) + 8)
		return false;
	iph = (const struct iphdr *)skb->data;
	ipprot = inet_protos[iph->protocol % IP_MAX_PROTOS];
	if (ipprot && ipprot->err_handler)
		ipprot->err_handler(skb);
	return false;
}

/* Each says whether it keeps the packet; the others are of no interest. */
static bool (*const icmp_pointers[ICMP_TYPES])(struct sk_buff *skb) = {
	[ICMP_ECHOREPLY] = ping_rcv,
	[ICMP_DEST_UNREACH] = icmp_unreach,
	[ICMP_ECHO] = icmp_echo,
};

int icmp_rcv(struct sk_buff *skb)
{
	const struct icmphdr *icmph = skb_transport_header(skb);

	if (skb->len < sizeof(*icmph) || ip_compute_csum(icmph, (int)skb->len) || icmph->type >= ICMP_TYPES)
		kfree_skb(skb);
	else if (!icmp_pointers[icmph->type] || !icmp_pointers[icmph->type](skb))
		consume_skb(skb);
	return 0;
}
