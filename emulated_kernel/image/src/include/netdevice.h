/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Network devices, of which there is one, and what packets go through above them. */
#ifndef _NETDEVICE_H
#define _NETDEVICE_H

#include "skbuff.h"

#define ETH_P_IP 0x0800
#define NET_RX_SUCCESS 0
#define NET_RX_DROP 1
#define NETDEV_TX_OK 0
#define LOOPBACK_MTU 16436
#define NETDEV_MAX_BACKLOG 1000

struct net_device_ops {
	int (*ndo_start_xmit)(struct sk_buff *skb, struct net_device *dev);
};

/* What went through a device on one CPU; changed with bottom halves off. */
struct pcpu_lstats {
	u64 rx_packets, tx_packets, rx_bytes, tx_bytes;
};

struct net_device {
	char name[16];
	int ifindex;
	unsigned int mtu;
	const struct net_device_ops *netdev_ops;
	struct pcpu_lstats *lstats; /* per-CPU */
};

struct packet_type {
	__be16 type;
	int (*func)(struct sk_buff *skb, struct net_device *dev, struct packet_type *pt,
		    struct net_device *orig_dev);
};

extern struct net_device loopback_dev;

void net_dev_init(void);
void dev_add_pack(struct packet_type *pt);
int __dev_queue_xmit(struct sk_buff *skb, struct net_device *sb_dev);
#define dev_queue_xmit(skb) __dev_queue_xmit(skb, NULL)
struct sk_buff *dev_hard_start_xmit(struct sk_buff *first, struct net_device *dev, int *ret);
int netif_rx(struct sk_buff *skb);
int netif_receive_skb(struct sk_buff *skb);

#endif
