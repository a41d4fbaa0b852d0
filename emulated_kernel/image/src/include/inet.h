/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The internet protocols: headers, sockets, and how the layers call one another. */
#ifndef _INET_H
#define _INET_H

#include "netdevice.h"
#include "sock.h"

#define INADDR_ANY 0
#define INADDR_LOOPBACK 0x7f000001
#define IPDEFTTL 64
#define IP_MAX_PROTOS 32

struct iphdr {
	u8 version_ihl;
	u8 tos;
	__be16 tot_len;
	__be16 id;
	__be16 frag_off;
	u8 ttl;
	u8 protocol;
	__sum16 check;
	__be32 saddr, daddr;
};

struct icmphdr {
	u8 type, code;
	__sum16 checksum;
	__be16 id, sequence;
};
#define ICMP_ECHOREPLY 0
#define ICMP_DEST_UNREACH 3
#define ICMP_ECHO 8
#define ICMP_PORT_UNREACH 3

struct udphdr {
	__be16 source, dest, len;
	__sum16 check;
};

struct net {
	int ifindex;
};
extern struct net init_net;

struct net_protocol {
	int (*handler)(struct sk_buff *skb);
	void (*err_handler)(struct sk_buff *skb);
};

static __always_inline struct iphdr *ip_hdr(const struct sk_buff *skb)
{
	return (struct iphdr *)(skb->head + skb->network_header);
}

static __always_inline void *skb_transport_header(const struct sk_buff *skb)
{
	return skb->head + skb->transport_header;
}

/* af_inet.c, ip_input.c, ip_output.c, route.c */
void inet_init(void);
int inet_add_protocol(const struct net_protocol *prot, u8 num);
extern const struct net_protocol *inet_protos[IP_MAX_PROTOS];
int inet_autobind(struct sock *sk);
int ip_rcv(struct sk_buff *skb, struct net_device *dev, struct packet_type *pt,
	   struct net_device *orig_dev);
int ip_local_deliver(struct sk_buff *skb);
int ip_queue_xmit(struct sock *sk, struct sk_buff *skb, void *fl);
int ip_local_out(struct net *net, struct sock *sk, struct sk_buff *skb);
int ip_output(struct net *net, struct sock *sk, struct sk_buff *skb);
int ip_build_and_send_pkt(struct sk_buff *skb, struct sock *sk, __be32 saddr, __be32 daddr, u8 protocol);
struct net_device *ip_route_output(__be32 daddr);

/* inet_hashtables.c: a socket that is found comes with a reference. */
struct sock *__inet_lookup_established(__be32 saddr, __be16 sport, __be32 daddr, u16 hnum);
struct sock *__inet_lookup_listener(__be32 daddr, u16 hnum);
struct sock *__udp4_lib_lookup(__be32 daddr, u16 hnum);
struct sock *ping_lookup(u16 ident);
void inet_hash(struct sock *sk);
void inet_unhash(struct sock *sk);
int inet_csk_get_port(struct sock *sk, unsigned short snum);
int inet_share_port(struct sock *sk, struct sock *with);
void inet_put_port(struct sock *sk);

/* inet_connection_sock.c */
int inet_csk_listen_start(struct sock *sk, int backlog);
void inet_csk_listen_stop(struct sock *sk);
struct sock *inet_csk_reqsk_queue_add(struct sock *sk, struct sock *child);
struct sock *inet_csk_accept(struct sock *sk, int flags, int *err, bool kern);
bool sk_acceptq_is_full(const struct sock *sk);
void inet_csk_destroy_sock(struct sock *sk);

/* udp.c, icmp.c, ping.c */
extern struct proto udp_prot, ping_prot;
int udp_rcv(struct sk_buff *skb);
void udp_err(struct sk_buff *skb);
int icmp_rcv(struct sk_buff *skb);
void icmp_send(struct sk_buff *skb_in, int type, int code);
bool ping_rcv(struct sk_buff *skb);




#endif
