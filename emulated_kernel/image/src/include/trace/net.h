/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Packets between protocols and devices; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM net

TRACE_EVENT(net_dev_start_xmit,
	PROTO(const struct sk_buff *skb, const struct net_device *dev),
	ARGS(skb, dev),
	FIELDS(
		__string(name)
		__field(u16, queue_mapping)
		__field(const void *, skbaddr)
		__field(bool, vlan_tagged)
		__field(u16, vlan_proto)
		__field(u16, vlan_tci)
		__field(u16, protocol)
		__field(u8, ip_summed)
		__field(unsigned int, len)
		__field(unsigned int, data_len)
		__field(int, network_offset)
		__field(bool, transport_offset_valid)
		__field(int, transport_offset)
		__field(u8, tx_flags)
		__field(u16, gso_size)
		__field(u16, gso_segs)
		__field(u16, gso_type)),
	/* One queue, no VLANs, no segments, sums by software: what is left is 0. */
	ASSIGN(
		__assign_str(name, dev->name);
		__entry->skbaddr = skb;
		__entry->protocol = ntohs(skb->protocol);
		__entry->len = skb->len;
		__entry->network_offset = (int)(skb->head + skb->network_header - skb->data);
		__entry->transport_offset_valid = true;
		__entry->transport_offset = (int)(skb->head + skb->transport_header - skb->data);),
	PRINT("dev=%s queue_mapping=%u skbaddr=%p vlan_tagged=%d vlan_proto=0x%04x vlan_tci=0x%04x protocol=0x%04x ip_summed=%d len=%u data_len=%u network_offset=%d transport_offset_valid=%d transport_offset=%d tx_flags=%d gso_size=%d gso_segs=%d gso_type=%#x",
	      __get_str(name), __entry->queue_mapping, __entry->skbaddr, __entry->vlan_tagged,
	      __entry->vlan_proto, __entry->vlan_tci, __entry->protocol, __entry->ip_summed,
	      __entry->len, __entry->data_len, __entry->network_offset,
	      __entry->transport_offset_valid, __entry->transport_offset, __entry->tx_flags,
	      __entry->gso_size, __entry->gso_segs, __entry->gso_type))

TRACE_EVENT(net_dev_xmit,
	PROTO(struct sk_buff *skb, int rc, struct net_device *dev, unsigned int skb_len),
	ARGS(skb, rc, dev, skb_len),
	FIELDS(
		__field(void *, skbaddr)
		__field(unsigned int, len)
		__field(int, rc)
		__string(name)),
	ASSIGN(
		__entry->skbaddr = skb;
		__entry->len = skb_len;
		__entry->rc = rc;
		__assign_str(name, dev->name);),
	PRINT("dev=%s skbaddr=%p len=%u rc=%d", __get_str(name), __entry->skbaddr, __entry->len,
	      __entry->rc))

EVENT_CLASS(net_dev_template,
	PROTO(struct sk_buff *skb),
	ARGS(skb),
	FIELDS(
		__field(void *, skbaddr)
		__field(unsigned int, len)
		__string(name)),
	ASSIGN(
		__entry->skbaddr = skb;
		__entry->len = skb->len;
		__assign_str(name, skb->dev->name);),
	PRINT("dev=%s skbaddr=%p len=%u", __get_str(name), __entry->skbaddr, __entry->len))

DEFINE_EVENT(net_dev_template, net_dev_queue, PROTO(struct sk_buff *skb), ARGS(skb))
DEFINE_EVENT(net_dev_template, netif_receive_skb, PROTO(struct sk_buff *skb), ARGS(skb))
DEFINE_EVENT(net_dev_template, netif_rx, PROTO(struct sk_buff *skb), ARGS(skb))
