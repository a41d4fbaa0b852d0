/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Why packets are dropped, with Linux 6.1's numbers; most of it can't happen here. */
#ifndef _DROPREASON_H
#define _DROPREASON_H

#define DROP_REASONS(R)                                                                        \
	R(1, NOT_SPECIFIED), R(2, NO_SOCKET), R(3, PKT_TOO_SMALL), R(4, TCP_CSUM),             \
	R(5, SOCKET_FILTER), R(6, UDP_CSUM), R(7, NETFILTER_DROP), R(8, OTHERHOST),            \
	R(9, IP_CSUM), R(10, IP_INHDR), R(11, IP_RPFILTER), R(12, UNICAST_IN_L2_MULTICAST),    \
	R(13, XFRM_POLICY), R(14, IP_NOPROTO), R(15, SOCKET_RCVBUFF), R(16, PROTO_MEM),        \
	R(17, TCP_MD5NOTFOUND), R(18, TCP_MD5UNEXPECTED), R(19, TCP_MD5FAILURE),               \
	R(20, SOCKET_BACKLOG), R(21, TCP_FLAGS), R(22, TCP_ZEROWINDOW), R(23, TCP_OLD_DATA),   \
	R(24, TCP_OVERWINDOW), R(25, TCP_OFOMERGE), R(26, TCP_RFC7323_PAWS),                   \
	R(27, TCP_INVALID_SEQUENCE), R(28, TCP_RESET), R(29, TCP_INVALID_SYN),                 \
	R(30, TCP_CLOSE), R(31, TCP_FASTOPEN), R(32, TCP_OLD_ACK), R(33, TCP_TOO_OLD_ACK),     \
	R(34, TCP_ACK_UNSENT_DATA), R(35, TCP_OFO_QUEUE_PRUNE), R(36, TCP_OFO_DROP),           \
	R(37, IP_OUTNOROUTES), R(38, BPF_CGROUP_EGRESS), R(39, IPV6DISABLED),                  \
	R(40, NEIGH_CREATEFAIL), R(41, NEIGH_FAILED), R(42, NEIGH_QUEUEFULL),                  \
	R(43, NEIGH_DEAD), R(44, TC_EGRESS), R(45, QDISC_DROP), R(46, CPU_BACKLOG),            \
	R(47, XDP), R(48, TC_INGRESS), R(49, UNHANDLED_PROTO), R(50, SKB_CSUM),                \
	R(51, SKB_GSO_SEG), R(52, SKB_UCOPY_FAULT), R(53, DEV_HDR), R(54, DEV_READY),          \
	R(55, FULL_RING), R(56, NOMEM), R(57, HDR_TRUNC), R(58, TAP_FILTER),                   \
	R(59, TAP_TXFILTER), R(60, ICMP_CSUM), R(61, INVALID_PROTO), R(62, IP_INADDRERRORS),   \
	R(63, IP_INNOROUTES), R(64, PKT_TOO_BIG), R(65, MAX)

#define drop_reason_value(number, name) SKB_DROP_REASON_##name = number
enum skb_drop_reason { SKB_NOT_DROPPED_YET, DROP_REASONS(drop_reason_value) };

#endif
