// SPDX-License-Identifier: GPL-2.0-or-later
// The loopback device: what is sent comes in.
#include "netdevice.h"

/* Runs with bottom halves off: what comes in waits until the sender has left the stack. */
static noinline int loopback_xmit(struct sk_buff *skb, struct net_device *dev __attribute__((unused)))
{
	skb_orphan(skb);
	skb->protocol = htons(ETH_P_IP);
	netif_rx(skb);
	return NETDEV_TX_OK;
}

static const struct net_device_ops loopback_ops = { .ndo_start_xmit = loopback_xmit };

static DEFINE_PER_CPU(struct pcpu_lstats, loopback_stats);

struct net_device loopback_dev = {
	.name = "lo", .ifindex = 1, .mtu = LOOPBACK_MTU, .netdev_ops = &loopback_ops,
	.lstats = &loopback_stats,
};
