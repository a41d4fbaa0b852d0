// SPDX-License-Identifier: GPL-2.0-or-later
// TCP over IPv4: from a packet to its socket, and the beginnings of connections.
#include "errno.h"
#include "hash.h"
#include "host_abi.h"
#include "mm.h"
#include "string.h"
#include "tcp.h"
#include "tracepoint.h"

static noinline __sum16 tcp_v4_check(const void *th, u32 len, __be32 saddr, __be32 daddr)
{
	return csum_tcpudp_magic(saddr, daddr, len, IPPROTO_TCP, csum_partial(th, (int)len, 0));
}

void tcp_v4_send_check(struct sk_buff *skb, __be32 saddr, __be32 daddr)
{
	struct tcphdr *th = tcp_hdr(skb);

	th->check = 0;
	th->check = tcp_v4_check(th, skb->len, saddr, daddr);
}

/* The first number of a stream: it depends on the machine's seed and its time. */
noinline u32 secure_tcp_seq(__be32 saddr, __be32 daddr, __be16 sport, __be16 dport)
{
	siphash_key_t key = { { boot_params.seed, ~boot_params.seed } };
	u32 tuple[3] = { saddr, daddr, (u32)sport << 16 | dport };

	return (u32)siphash(tuple, sizeof(tuple), &key) + (u32)(sched_clock() >> 6);
}

/* To a packet that no socket wants, or that belongs to nobody: NULL. */
static noinline void tcp_v4_send_reset(const struct sock *sk, const struct sk_buff *skb)
{
	const struct tcphdr *th = tcp_hdr(skb);
	struct sk_buff *reply;
	struct tcphdr *rep;

	if (th->flags & TCPHDR_RST)
		return;
	if (sk)
		trace_tcp_send_reset(sk, skb);
	reply = alloc_skb(MAX_HEADER + sizeof(*rep), GFP_ATOMIC);
	if (!reply)
		return;
	skb_reserve(reply, MAX_HEADER);
	rep = skb_put(reply, sizeof(*rep));
	*rep = (struct tcphdr){
		.source = th->dest, .dest = th->source, .doff = sizeof(*rep) / 4 << 4, .flags = TCPHDR_RST,
	};
	if (th->flags & TCPHDR_ACK) {
		rep->seq = th->ack_seq;
	} else {
		rep->flags |= TCPHDR_ACK;
		rep->ack_seq = htonl(TCP_SKB_CB(skb)->end_seq);
	}
	skb_reset_transport_header(reply);
	tcp_v4_send_check(reply, ip_hdr(skb)->daddr, ip_hdr(skb)->saddr);
	ip_build_and_send_pkt(reply, NULL, ip_hdr(skb)->daddr, ip_hdr(skb)->saddr, IPPROTO_TCP);
}

static noinline struct sock *tcp_create_openreq_child(const struct sock *sk, const struct sk_buff *skb)
{
	struct sock *newsk = sk_alloc(&tcp_prot, GFP_ATOMIC);

	if (!newsk)
		return NULL;
	sock_init_data(NULL, newsk);
	newsk->sk_dead = true;
	newsk->sk_protocol = IPPROTO_TCP;
	newsk->sk_sndbuf = sk->sk_sndbuf;
	newsk->sk_rcvbuf = sk->sk_rcvbuf;
	newsk->sk_daddr = ip_hdr(skb)->saddr;
	newsk->sk_rcv_saddr = ip_hdr(skb)->daddr;
	newsk->sk_dport = tcp_hdr(skb)->source;
	newsk->sk_num = sk->sk_num;
	newsk->sk_state = sk->sk_state;
	tcp_init_sock_data(newsk);
	return newsk;
}

/* It comes locked: as soon as it is in the table, another CPU may have a packet for it. */
static noinline struct sock *tcp_v4_syn_recv_sock(struct sock *sk, struct sk_buff *skb)
{
	struct sock *newsk = tcp_create_openreq_child(sk, skb);
	struct tcp_sock *tp = tcp_sk(newsk);

	if (!newsk)
		return NULL;
	tp->rcv_nxt = tp->copied_seq = tp->rcv_wup = TCP_SKB_CB(skb)->seq + 1;
	tp->snd_una = tp->snd_nxt = tp->write_seq = secure_tcp_seq(
		newsk->sk_rcv_saddr, newsk->sk_daddr, htons(newsk->sk_num), newsk->sk_dport);
	tp->snd_wnd = ntohs(tcp_hdr(skb)->window);
	sock_hold(sk);
	newsk->sk_listener = sk;
	bh_lock_sock(newsk);
	inet_share_port(newsk, sk);
	tcp_set_state(newsk, TCP_SYN_RECV);
	inet_hash(newsk);
	return newsk;
}

/* Sent twice, the second time while the first one waited for the listener's lock. */
static noinline bool tcp_request_is_known(const struct sk_buff *skb)
{
	const struct iphdr *iph = ip_hdr(skb);
	const struct tcphdr *th = tcp_hdr(skb);
	struct sock *sk = __inet_lookup_established(iph->saddr, th->source, iph->daddr, ntohs(th->dest));

	if (sk)
		sock_put(sk);
	return sk != NULL;
}

/*
 * Linux remembers a request, and makes the socket when it is acknowledged; here it is there at once. The
 * listener is locked, by its spinlock or by a task that sees to its backlog.
 */
int tcp_conn_request(struct sock *sk, struct sk_buff *skb)
{
	struct sock *newsk;

	if (sk_acceptq_is_full(sk) || tcp_request_is_known(skb))
		return 0;
	local_bh_disable();
	newsk = tcp_v4_syn_recv_sock(sk, skb);
	if (newsk) {
		tcp_send_syn(newsk, TCPHDR_SYN | TCPHDR_ACK);
		bh_unlock_sock(newsk);
	}
	local_bh_enable();
	return 0;
}

int tcp_v4_connect(struct sock *sk, struct sockaddr_in *uaddr)
{
	struct tcp_sock *tp = tcp_sk(sk);
	__be32 daddr = uaddr->sin_addr ? uaddr->sin_addr : htonl(INADDR_LOOPBACK);
	int err = 0;

	if (!ip_route_output(daddr))
		return -ENETUNREACH;
	if (!sk->sk_num)
		err = inet_csk_get_port(sk, 0);
	if (err)
		return err;
	sk->sk_daddr = daddr;
	sk->sk_dport = uaddr->sin_port;
	if (!sk->sk_rcv_saddr)
		sk->sk_rcv_saddr = htonl(INADDR_LOOPBACK);
	sk->sk_err = 0;
	sk->sk_shutdown = 0;
	tp->snd_una = tp->snd_nxt = tp->write_seq =
		secure_tcp_seq(sk->sk_rcv_saddr, daddr, htons(sk->sk_num), sk->sk_dport);
	tcp_set_state(sk, TCP_SYN_SENT);
	inet_hash(sk);
	tcp_send_syn(sk, TCPHDR_SYN);
	return 0;
}

noinline int tcp_v4_do_rcv(struct sock *sk, struct sk_buff *skb)
{
	if (sk->sk_state == TCP_ESTABLISHED) {
		tcp_rcv_established(sk, skb);
		return 0;
	}
	if (tcp_rcv_state_process(sk, skb)) {
		tcp_v4_send_reset(sk, skb);
		kfree_skb(skb);
	}
	return 0;
}

static noinline bool tcp_add_backlog(struct sock *sk, struct sk_buff *skb)
{
	sk_add_backlog(sk, skb);
	return false;
}

static noinline void tcp_v4_fill_cb(struct sk_buff *skb, const struct tcphdr *th)
{
	struct tcp_skb_cb *tcb = TCP_SKB_CB(skb);

	tcb->seq = ntohl(th->seq);
	tcb->ack_seq = ntohl(th->ack_seq);
	tcb->tcp_flags = th->flags;
	tcb->end_seq = tcb->seq + skb->len - (th->doff >> 4) * 4 + !!(th->flags & TCPHDR_SYN) +
		       !!(th->flags & TCPHDR_FIN);
}

static noinline struct sock *__inet_lookup_skb(const struct sk_buff *skb, const struct tcphdr *th)
{
	const struct iphdr *iph = ip_hdr(skb);
	struct sock *sk = __inet_lookup_established(iph->saddr, th->source, iph->daddr, ntohs(th->dest));

	return sk ? sk : __inet_lookup_listener(iph->daddr, ntohs(th->dest));
}

static noinline enum skb_drop_reason tcp_v4_check_packet(const struct sk_buff *skb, const struct tcphdr *th)
{
	if (skb->len < sizeof(*th) || th->doff >> 4 != sizeof(*th) / 4)
		return SKB_DROP_REASON_PKT_TOO_SMALL;
	if (tcp_v4_check(th, skb->len, ip_hdr(skb)->saddr, ip_hdr(skb)->daddr))
		return SKB_DROP_REASON_TCP_CSUM;
	return 0;
}

int tcp_v4_rcv(struct sk_buff *skb)
{
	const struct tcphdr *th = tcp_hdr(skb);
	enum skb_drop_reason reason = tcp_v4_check_packet(skb, th);
	struct sock *sk;

	if (reason) {
		kfree_skb_reason(skb, reason);
		return 0;
	}
	tcp_v4_fill_cb(skb, th);
	sk = __inet_lookup_skb(skb, th);
	if (!sk) {
		tcp_v4_send_reset(NULL, skb);
		kfree_skb_reason(skb, SKB_DROP_REASON_NO_SOCKET);
		return 0;
	}
	skb_pull(skb, sizeof(*th));
	bh_lock_sock(sk);
	if (!sock_owned_by_user(sk))
		tcp_v4_do_rcv(sk, skb);
	else
		tcp_add_backlog(sk, skb);
	bh_unlock_sock(sk);
	sock_put(sk);
	return 0;
}
