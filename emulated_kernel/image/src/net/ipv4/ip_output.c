// SPDX-License-Identifier: GPL-2.0-or-later
// From a protocol down to the device.
#include "errno.h"
#include "inet.h"
#include "string.h"

static atomic_t ip_ident;

/* Deviates: nothing is fragmented; a packet that is too long isn't sent. */
static noinline int ip_finish_output2(struct sk_buff *skb)
{
	return dev_queue_xmit(skb);
}

static noinline int ip_finish_output(struct net *net __attribute__((unused)),
				     struct sock *sk __attribute__((unused)), struct sk_buff *skb)
{
	if (unlikely(skb->len > skb->dev->mtu)) {
		kfree_skb(skb);
		return -EMSGSIZE;
	}
	return ip_finish_output2(skb);
}

noinline int ip_output(struct net *net, struct sock *sk, struct sk_buff *skb)
{
	skb->protocol = htons(ETH_P_IP);
	return ip_finish_output(net, sk, skb);
}

void ip_send_check(struct iphdr *iph);
noinline void ip_send_check(struct iphdr *iph)
{
	iph->check = 0;
	iph->check = ip_fast_csum(iph, sizeof(*iph) / 4);
}

static noinline int __ip_local_out(struct sk_buff *skb)
{
	struct iphdr *iph = ip_hdr(skb);

	iph->tot_len = htons(skb->len);
	ip_send_check(iph);
	return 1;
}

noinline int ip_local_out(struct net *net, struct sock *sk, struct sk_buff *skb)
{
	int err = __ip_local_out(skb);

	return err == 1 ? ip_output(net, sk, skb) : err;
}

static void ip_push_header(struct sk_buff *skb, __be32 saddr, __be32 daddr, u8 protocol)
{
	struct iphdr *iph = skb_push(skb, sizeof(*iph));

	skb_reset_network_header(skb);
	memset(iph, 0, sizeof(*iph));
	iph->version_ihl = 0x45;
	iph->id = htons((u16)__atomic_fetch_add(&ip_ident.counter, 1, __ATOMIC_RELAXED));
	iph->frag_off = htons(0x4000);
	iph->ttl = IPDEFTTL;
	iph->protocol = protocol;
	iph->saddr = saddr;
	iph->daddr = daddr;
}

/* A packet of a socket that knows where it goes. */
static noinline int __ip_queue_xmit(struct sock *sk, struct sk_buff *skb)
{
	skb->dev = ip_route_output(sk->sk_daddr);
	if (!skb->dev) {
		kfree_skb(skb);
		return -EHOSTUNREACH;
	}
	ip_push_header(skb, sk->sk_rcv_saddr, sk->sk_daddr, sk->sk_protocol);
	return ip_local_out(&init_net, sk, skb);
}

int ip_queue_xmit(struct sock *sk, struct sk_buff *skb, void *fl __attribute__((unused)))
{
	return __ip_queue_xmit(sk, skb);
}

/* Any other packet. */
int ip_build_and_send_pkt(struct sk_buff *skb, struct sock *sk, __be32 saddr, __be32 daddr, u8 protocol)
{
	skb->dev = ip_route_output(daddr);
	if (!skb->dev) {
		kfree_skb(skb);
		return -ENETUNREACH;
	}
	ip_push_header(skb, saddr, daddr, protocol);
	return ip_local_out(&init_net, sk, skb);
}
