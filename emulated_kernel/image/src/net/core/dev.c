// SPDX-License-Identifier: GPL-2.0-or-later
// Between protocols and devices: packets go out at once, and come in by a softirq.
#include "netdevice.h"
#include "errno.h"
#include "sched.h"
#include "smp.h"
#include "timer.h"
#include "tracepoint.h"

#define NETDEV_BUDGET 300

/* The packets that came in on this CPU; nobody else touches it. */
struct softnet_data {
	struct sk_buff_head input_pkt_queue;
	unsigned int processed;
	unsigned int dropped;
};
static DEFINE_PER_CPU(struct softnet_data, softnet_data);
static struct packet_type *ptype_ip;

void dev_add_pack(struct packet_type *pt)
{
	ptype_ip = pt;
}

static noinline int xmit_one(struct sk_buff *skb, struct net_device *dev)
{
	unsigned int len = skb->len;
	int rc;

	this_cpu_ptr(dev->lstats)->tx_packets++;
	this_cpu_ptr(dev->lstats)->tx_bytes += len;
	trace_net_dev_start_xmit(skb, dev);
	rc = dev->netdev_ops->ndo_start_xmit(skb, dev);
	trace_net_dev_xmit(skb, rc, dev, len);
	return rc;
}

noinline struct sk_buff *dev_hard_start_xmit(struct sk_buff *first, struct net_device *dev, int *ret)
{
	*ret = xmit_one(first, dev);
	return NULL;
}

int __dev_queue_xmit(struct sk_buff *skb, struct net_device *sb_dev __attribute__((unused)))
{
	int rc;

	local_bh_disable();
	trace_net_dev_queue(skb);
	dev_hard_start_xmit(skb, skb->dev, &rc);
	local_bh_enable();
	return rc;
}

/* Interrupts are off. */
static noinline int enqueue_to_backlog(struct sk_buff *skb)
{
	struct softnet_data *sd = this_cpu_ptr(&softnet_data);

	if (unlikely(sd->input_pkt_queue.qlen > NETDEV_MAX_BACKLOG)) {
		sd->dropped++;
		kfree_skb_reason(skb, SKB_DROP_REASON_CPU_BACKLOG);
		return NET_RX_DROP;
	}
	__skb_queue_tail(&sd->input_pkt_queue, skb);
	raise_softirq_irqoff(NET_RX_SOFTIRQ);
	return NET_RX_SUCCESS;
}

static noinline int netif_rx_internal(struct sk_buff *skb)
{
	unsigned long flags;
	int ret;

	trace_netif_rx(skb);
	local_irq_save(flags);
	ret = enqueue_to_backlog(skb);
	local_irq_restore(flags);
	return ret;
}

int netif_rx(struct sk_buff *skb)
{
	int ret;

	local_bh_disable();
	ret = netif_rx_internal(skb);
	local_bh_enable();
	return ret;
}

static noinline int __netif_receive_skb_core(struct sk_buff *skb)
{
	struct packet_type *pt = ptype_ip;

	trace_netif_receive_skb(skb);
	this_cpu_ptr(skb->dev->lstats)->rx_packets++;
	this_cpu_ptr(skb->dev->lstats)->rx_bytes += skb->len;
	skb_reset_network_header(skb);
	if (pt && pt->type == skb->protocol)
		return pt->func(skb, skb->dev, pt, skb->dev);
	kfree_skb_reason(skb, SKB_DROP_REASON_UNHANDLED_PROTO);
	return NET_RX_DROP;
}

static noinline int __netif_receive_skb(struct sk_buff *skb)
{
	return __netif_receive_skb_core(skb);
}

int netif_receive_skb(struct sk_buff *skb)
{
	return __netif_receive_skb(skb);
}

static noinline int process_backlog(struct softnet_data *sd, int quota)
{
	struct sk_buff *skb;
	unsigned long flags;
	int work = 0;

	while (work < quota) {
		local_irq_save(flags);
		skb = __skb_dequeue(&sd->input_pkt_queue);
		local_irq_restore(flags);
		if (!skb)
			break;
		sd->processed++;
		__netif_receive_skb(skb);
		work++;
	}
	return work;
}

static noinline void net_rx_action(void)
{
	struct softnet_data *sd = this_cpu_ptr(&softnet_data);

	if (process_backlog(sd, NETDEV_BUDGET) == NETDEV_BUDGET)
		raise_softirq(NET_RX_SOFTIRQ);
}

__init void net_dev_init(void)
{
	int cpu;

	for_each_possible_cpu(cpu)
		skb_queue_head_init(&per_cpu_ptr(&softnet_data, cpu)->input_pkt_queue);
	skb_init();
	open_softirq(NET_RX_SOFTIRQ, net_rx_action);
}
