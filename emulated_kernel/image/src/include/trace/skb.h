/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The ends of packets; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM skb

TRACE_EVENT(kfree_skb,
	PROTO(struct sk_buff *skb, void *location, enum skb_drop_reason reason),
	ARGS(skb, location, reason),
	FIELDS(
		__field(void *, skbaddr)
		__field(void *, location)
		__field(unsigned short, protocol)
		__field(enum skb_drop_reason, reason)),
	ASSIGN(
		__entry->skbaddr = skb;
		__entry->location = location;
		__entry->protocol = ntohs(skb->protocol);
		__entry->reason = reason;),
	PRINT("skbaddr=%p protocol=%u location=%p reason: %s", __entry->skbaddr, __entry->protocol,
	      __entry->location, __print_symbolic(__entry->reason, DROP_REASONS(drop_reason_string))))

TRACE_EVENT(consume_skb,
	PROTO(struct sk_buff *skb),
	ARGS(skb),
	FIELDS(__field(void *, skbaddr)),
	ASSIGN(__entry->skbaddr = skb;),
	PRINT("skbaddr=%p", __entry->skbaddr))

TRACE_EVENT(skb_copy_datagram_iovec,
	PROTO(const struct sk_buff *skb, int len),
	ARGS(skb, len),
	FIELDS(
		__field(const void *, skbaddr)
		__field(int, len)),
	ASSIGN(
		__entry->skbaddr = skb;
		__entry->len = len;),
	PRINT("skbaddr=%p len=%d", __entry->skbaddr, __entry->len))
