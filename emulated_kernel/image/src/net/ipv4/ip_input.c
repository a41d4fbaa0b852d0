// SPDX-License-Identifier: GPL-2.0-or-later
// From the device up to a protocol.
#include "inet.h"

const struct net_protocol *inet_protos[IP_MAX_PROTOS];

int inet_add_protocol(const struct net_protocol *prot, u8 num)
{
	inet_protos[num % IP_MAX_PROTOS] = prot;
	return 0;
}

static noinline void ip_protocol_deliver_rcu(struct net *net __attribute__((unused)),
					     struct sk_buff *skb, int protocol)
{
	const struct net_protocol *ipprot = inet_protos[protocol % IP_MAX_PROTOS];

	if (ipprot)
		ipprot->handler(skb);
	else
		kfree_skb_reason(skb, SKB_DROP_REASON_IP_NOPROTO);
}

static noinline int ip_local_deliver_finish(struct net *net, struct sk_buff *skb)
{
	skb_pull(skb, sizeof(struct iphdr));
	skb_reset_transport_header(skb);
	ip_protocol_deliver_rcu(net, skb, ip_hdr(skb)->protocol);
	return 0;
}

noinline int ip_local_deliver(struct sk_buff *skb)
{
	return ip_local_deliver_finish(&init_net, skb);
}

static noinline int ip_rcv_finish(struct net *net __attribute__((unused)), struct sk_buff *skb)
{
	if (!ip_route_output(ip_hdr(skb)->daddr)) {
		kfree_skb(skb);
		return NET_RX_DROP;
	}
	return ip_local_deliver(skb);
}

/* NULL: it was no good, and is gone. */
static noinline struct sk_buff *ip_rcv_core(struct sk_buff *skb)
{
	const struct iphdr *iph = ip_hdr(skb);
	u32 len;

	if (skb->len < sizeof(*iph) || iph->version_ihl != 0x45)
		goto drop;
	if (unlikely(ip_fast_csum(iph, sizeof(*iph) / 4)))
		goto drop;
	len = ntohs(iph->tot_len);
	if (skb->len < len || len < sizeof(*iph))
		goto drop;
	skb_trim(skb, len);
	return skb;

drop:
	kfree_skb(skb);
	return NULL;
}

int ip_rcv(struct sk_buff *skb, struct net_device *dev __attribute__((unused)),
	   struct packet_type *pt __attribute__((unused)),
	   struct net_device *orig_dev __attribute__((unused)))
{
	skb = ip_rcv_core(skb);
	return skb ? ip_rcv_finish(&init_net, skb) : NET_RX_DROP;
}
