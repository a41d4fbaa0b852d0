// SPDX-License-Identifier: GPL-2.0-or-later
// Datagrams.
#include "errno.h"
#include "inet.h"
#include "mm.h"
#include "printk.h"
#include "string.h"
#include "tracepoint.h"

static int udp_destination(struct sock *sk, const struct msghdr *msg, __be32 *daddr, __be16 *dport)
{
	if (msg->msg_name) {
		if (msg->msg_name->sin_family != AF_INET)
			return -EAFNOSUPPORT;
		*daddr = msg->msg_name->sin_addr;
		*dport = msg->msg_name->sin_port;
	} else {
		*daddr = sk->sk_daddr;
		*dport = sk->sk_dport;
	}
	return *dport ? 0 : msg->msg_name ? -EINVAL : -EDESTADDRREQ;
}

static noinline int udp_send_skb(struct sk_buff *skb, struct sock *sk, __be32 daddr, __be16 dport)
{
	__be32 saddr = sk->sk_rcv_saddr ? sk->sk_rcv_saddr : htonl(INADDR_LOOPBACK);
	struct udphdr *uh = skb_push(skb, sizeof(*uh));

	skb_reset_transport_header(skb);
	uh->source = htons(sk->sk_num);
	uh->dest = dport;
	uh->len = htons(skb->len);
	uh->check = 0;
	uh->check = csum_tcpudp_magic(saddr, daddr, skb->len, IPPROTO_UDP, csum_partial(uh, (int)skb->len, 0));
	if (!uh->check)
		uh->check = 0xffff;
	return ip_build_and_send_pkt(skb, sk, saddr, daddr, IPPROTO_UDP);
}

static int udp_sendmsg(struct sock *sk, struct msghdr *msg, size_t len)
{
	struct sk_buff *skb;
	__be32 daddr;
	__be16 dport;
	int err = udp_destination(sk, msg, &daddr, &dport);

	if (!err)
		err = sock_error(sk);
	if (!err && len > LOOPBACK_MTU - sizeof(struct iphdr) - sizeof(struct udphdr))
		err = -EMSGSIZE;
	if (!err && !sk->sk_num)
		err = inet_autobind(sk);
	if (err)
		return err;
	skb = alloc_skb(MAX_HEADER + (unsigned int)len, GFP_KERNEL);
	if (!skb)
		return -ENOMEM;
	skb_reserve(skb, MAX_HEADER);
	if (copy_from_iter(skb_put(skb, (unsigned int)len), len, &msg->msg_iter) != len) {
		kfree_skb(skb);
		return -EFAULT;
	}
	err = udp_send_skb(skb, sk, daddr, dport);
	return err ? err : (int)len;
}

static int udp_recvmsg(struct sock *sk, struct msghdr *msg, size_t len, int flags, int *addr_len)
{
	struct sk_buff *skb;
	size_t copied;
	int err;

	skb = skb_recv_datagram(sk, (unsigned int)flags, &err);
	if (!skb)
		return err;
	copied = min(len, (size_t)skb->len);
	trace_skb_copy_datagram_iovec(skb, (int)copied);
	err = copy_to_iter(skb->data, copied, &msg->msg_iter) == copied ? (int)copied : -EFAULT;
	if (msg->msg_name) {
		*msg->msg_name = (struct sockaddr_in){
			.sin_family = AF_INET,
			.sin_port = ((struct udphdr *)skb_transport_header(skb))->source,
			.sin_addr = ip_hdr(skb)->saddr,
		};
		*addr_len = sizeof(struct sockaddr_in);
	}
	consume_skb(skb);
	return err;
}

static noinline int udp_queue_rcv_skb(struct sock *sk, struct sk_buff *skb)
{
	int rc = sock_queue_rcv_skb(sk, skb);

	if (rc < 0) {
		kfree_skb_reason(skb, SKB_DROP_REASON_SOCKET_RCVBUFF);
		trace_udp_fail_queue_rcv_skb(rc, sk);
	}
	return rc;
}

static noinline bool udp4_csum_ok(const struct sk_buff *skb, const struct udphdr *uh)
{
	const struct iphdr *iph = ip_hdr(skb);

	return !uh->check || !csum_tcpudp_magic(iph->saddr, iph->daddr, skb->len, IPPROTO_UDP,
						csum_partial(uh, (int)skb->len, 0));
}

static noinline int __udp4_lib_rcv(struct sk_buff *skb)
{
	const struct udphdr *uh = skb_transport_header(skb);
	struct sock *sk;

	if (skb->len < sizeof(*uh) || ntohs(uh->len) != skb->len) {
		kfree_skb_reason(skb, SKB_DROP_REASON_PKT_TOO_SMALL);
		return 0;
	}
	if (!udp4_csum_ok(skb, uh)) {
		kfree_skb_reason(skb, SKB_DROP_REASON_UDP_CSUM);
		return 0;
	}
	sk = __udp4_lib_lookup(ip_hdr(skb)->daddr, ntohs(uh->dest));
	if (!sk) {
		icmp_send(skb, ICMP_DEST_UNREACH, ICMP_PORT_UNREACH);
		kfree_skb_reason(skb, SKB_DROP_REASON_NO_SOCKET);
		return 0;
	}
	skb_pull(skb, sizeof(*uh));
	if (sk->sk_daddr && (sk->sk_daddr != ip_hdr(skb)->saddr || sk->sk_dport != uh->source))
		kfree_skb_reason(skb, SKB_DROP_REASON_SOCKET_FILTER);
	else
		udp_queue_rcv_skb(sk, skb);
	sock_put(sk);
	return 0;
}

int udp_rcv(struct sk_buff *skb)
{
	return __udp4_lib_rcv(skb);
}

/* A packet of ours came back: skb->data is at its IP header. A socket with a peer is told. */
void udp_err(struct sk_buff *skb)
{
	const struct iphdr *iph = (const struct iphdr *)skb->data;
	const struct udphdr *uh = (const struct udphdr *)(iph + 1);
	struct sock *sk = __udp4_lib_lookup(iph->saddr, ntohs(uh->source));

	if (!sk)
		return;
	if (sk->sk_daddr) {
		sk->sk_err = ECONNREFUSED;
		sk_error_report(sk);
	}
	sock_put(sk);
}

static int udp_connect(struct sock *sk, struct sockaddr_in *uaddr)
{
	if (!ip_route_output(uaddr->sin_addr))
		return -ENETUNREACH;
	sk->sk_daddr = uaddr->sin_addr;
	sk->sk_dport = uaddr->sin_port;
	if (!sk->sk_rcv_saddr)
		sk->sk_rcv_saddr = htonl(INADDR_LOOPBACK);
	sk->sk_state = TCP_ESTABLISHED;
	return 0;
}

/* Datagrams are found by the port alone: with it the socket is in the table. */
static int udp_v4_get_port(struct sock *sk, unsigned short snum)
{
	int err = inet_csk_get_port(sk, snum);

	if (!err)
		inet_hash(sk);
	return err;
}

static void datagram_close(struct sock *sk, long timeout __attribute__((unused)))
{
	inet_unhash(sk);
	inet_put_port(sk);
	sock_put(sk);
}

static void datagram_shutdown(struct sock *sk, int how __attribute__((unused)))
{
	sock_def_wakeup(sk);
}

struct proto udp_prot = {
	.name = "UDP",
	.obj_size = sizeof(struct sock),
	.close = datagram_close,
	.connect = udp_connect,
	.shutdown = datagram_shutdown,
	.sendmsg = udp_sendmsg,
	.recvmsg = udp_recvmsg,
	.get_port = udp_v4_get_port,
	.unhash = inet_unhash,
};

/* Echo requests of sockets: the port is their number. */
static int ping_v4_sendmsg(struct sock *sk, struct msghdr *msg, size_t len)
{
	struct icmphdr *icmph;
	struct sk_buff *skb;
	__be32 daddr = msg->msg_name ? msg->msg_name->sin_addr : sk->sk_daddr;

	if (!daddr)
		return -EDESTADDRREQ;
	if (len < sizeof(*icmph))
		return -EINVAL;
	if (len > LOOPBACK_MTU - sizeof(struct iphdr))
		return -EMSGSIZE;
	if (!sk->sk_num && inet_autobind(sk))
		return -EAGAIN;
	skb = alloc_skb(MAX_HEADER + (unsigned int)len, GFP_KERNEL);
	if (!skb)
		return -ENOMEM;
	skb_reserve(skb, MAX_HEADER);
	icmph = skb_put(skb, (unsigned int)len);
	skb_reset_transport_header(skb);
	if (copy_from_iter(icmph, len, &msg->msg_iter) != len || icmph->type != ICMP_ECHO || icmph->code) {
		kfree_skb(skb);
		return -EINVAL;
	}
	icmph->id = htons(sk->sk_num);
	icmph->checksum = 0;
	icmph->checksum = ip_compute_csum(icmph, (int)len);
	skb->sk = NULL;
	return ip_build_and_send_pkt(skb, sk, htonl(INADDR_LOOPBACK), daddr, IPPROTO_ICMP) ? -ENETUNREACH :
											      (int)len;
}

/* Whether a socket took it. */
bool ping_rcv(struct sk_buff *skb)
{
	struct icmphdr *icmph = skb_transport_header(skb);
	struct sock *sk = ping_lookup(ntohs(icmph->id));
	bool taken;

	if (!sk)
		return false;
	taken = !sock_queue_rcv_skb(sk, skb);
	sock_put(sk);
	return taken;
}

struct proto ping_prot = {
	.name = "PING",
	.obj_size = sizeof(struct sock),
	.close = datagram_close,
	.connect = udp_connect,
	.shutdown = datagram_shutdown,
	.sendmsg = ping_v4_sendmsg,
	.recvmsg = udp_recvmsg,
	.get_port = udp_v4_get_port,
	.unhash = inet_unhash,
};
