/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The events of sockets, and those of TCP's and UDP's; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM sock

TRACE_EVENT(sock_rcvqueue_full,
	PROTO(struct sock *sk, struct sk_buff *skb),
	ARGS(sk, skb),
	FIELDS(
		__field(int, rmem_alloc)
		__field(unsigned int, truesize)
		__field(int, sk_rcvbuf)),
	ASSIGN(
		__entry->rmem_alloc = atomic_read(&sk->sk_rmem_alloc);
		__entry->truesize = skb->truesize;
		__entry->sk_rcvbuf = sk->sk_rcvbuf;),
	PRINT("rmem_alloc=%d truesize=%u sk_rcvbuf=%d", __entry->rmem_alloc, __entry->truesize,
	      __entry->sk_rcvbuf))

TRACE_EVENT(inet_sock_set_state,
	PROTO(const struct sock *sk, const int oldstate, const int newstate),
	ARGS(sk, oldstate, newstate),
	FIELDS(
		__field(const void *, skaddr)
		__field(int, oldstate)
		__field(int, newstate)
		__field(__u16, sport)
		__field(__u16, dport)
		__field(__u16, family)
		__field(__u16, protocol)
		__array(__u8, saddr, 4)
		__array(__u8, daddr, 4)
		__array(__u8, saddr_v6, 16)
		__array(__u8, daddr_v6, 16)),
	ASSIGN(
		__entry->skaddr = sk;
		__entry->oldstate = oldstate;
		__entry->newstate = newstate;
		__entry->protocol = sk->sk_protocol;
		trace_socket_ends(__entry, sk);),
	PRINT("family=%s protocol=%s sport=%hu dport=%hu saddr=%pI4 daddr=%pI4 saddrv6=%pI6c daddrv6=%pI6c oldstate=%s newstate=%s",
	      show_family_name(__entry->family), show_inet_protocol_name(__entry->protocol),
	      __entry->sport, __entry->dport, __entry->saddr, __entry->daddr, __entry->saddr_v6,
	      __entry->daddr_v6, show_socket_state_number(__entry->oldstate),
	      show_socket_state_number(__entry->newstate)))

TRACE_EVENT(inet_sk_error_report,
	PROTO(const struct sock *sk),
	ARGS(sk),
	FIELDS(
		__field(int, error)
		__field(__u16, sport)
		__field(__u16, dport)
		__field(__u16, family)
		__field(__u16, protocol)
		__array(__u8, saddr, 4)
		__array(__u8, daddr, 4)
		__array(__u8, saddr_v6, 16)
		__array(__u8, daddr_v6, 16)),
	ASSIGN(
		__entry->error = sk->sk_err;
		__entry->protocol = sk->sk_protocol;
		trace_socket_ends(__entry, sk);),
	PRINT("family=%s protocol=%s sport=%hu dport=%hu saddr=%pI4 daddr=%pI4 saddrv6=%pI6c daddrv6=%pI6c error=%d",
	      show_family_name(__entry->family), show_inet_protocol_name(__entry->protocol),
	      __entry->sport, __entry->dport, __entry->saddr, __entry->daddr, __entry->saddr_v6,
	      __entry->daddr_v6, __entry->error))

#undef TRACE_SYSTEM
#define TRACE_SYSTEM udp

TRACE_EVENT(udp_fail_queue_rcv_skb,
	PROTO(int rc, struct sock *sk),
	ARGS(rc, sk),
	FIELDS(
		__field(int, rc)
		__field(__u16, lport)),
	ASSIGN(
		__entry->rc = rc;
		__entry->lport = sk->sk_num;),
	PRINT("rc=%d port=%hu", __entry->rc, __entry->lport))

#undef TRACE_SYSTEM
#define TRACE_SYSTEM tcp

/* `skb` is the packet that is sent again, or that is answered with a reset. */
EVENT_CLASS(tcp_event_sk_skb,
	PROTO(const struct sock *sk, const struct sk_buff *skb),
	ARGS(sk, skb),
	FIELDS(
		__field(const void *, skbaddr)
		__field(const void *, skaddr)
		__field(int, state)
		__field(__u16, sport)
		__field(__u16, dport)
		__field(__u16, family)
		__array(__u8, saddr, 4)
		__array(__u8, daddr, 4)
		__array(__u8, saddr_v6, 16)
		__array(__u8, daddr_v6, 16)),
	ASSIGN(
		__entry->skbaddr = skb;
		__entry->skaddr = sk;
		__entry->state = sk->sk_state;
		trace_socket_ends(__entry, sk);),
	PRINT("family=%s sport=%hu dport=%hu saddr=%pI4 daddr=%pI4 saddrv6=%pI6c daddrv6=%pI6c state=%s",
	      show_family_name(__entry->family), __entry->sport, __entry->dport, __entry->saddr,
	      __entry->daddr, __entry->saddr_v6, __entry->daddr_v6,
	      show_tcp_state_name(__entry->state)))

DEFINE_EVENT(tcp_event_sk_skb, tcp_retransmit_skb,
	PROTO(const struct sock *sk, const struct sk_buff *skb), ARGS(sk, skb))
DEFINE_EVENT(tcp_event_sk_skb, tcp_send_reset,
	PROTO(const struct sock *sk, const struct sk_buff *skb), ARGS(sk, skb))

EVENT_CLASS(tcp_event_sk,
	PROTO(struct sock *sk),
	ARGS(sk),
	FIELDS(
		__field(const void *, skaddr)
		__field(__u16, sport)
		__field(__u16, dport)
		__field(__u16, family)
		__array(__u8, saddr, 4)
		__array(__u8, daddr, 4)
		__array(__u8, saddr_v6, 16)
		__array(__u8, daddr_v6, 16)
		__field(__u64, sock_cookie)),
	ASSIGN(
		__entry->skaddr = sk;
		trace_socket_ends(__entry, sk);
		__entry->sock_cookie = sock_gen_cookie(sk);),
	PRINT("family=%s sport=%hu dport=%hu saddr=%pI4 daddr=%pI4 saddrv6=%pI6c daddrv6=%pI6c sock_cookie=%llx",
	      show_family_name(__entry->family), __entry->sport, __entry->dport, __entry->saddr,
	      __entry->daddr, __entry->saddr_v6, __entry->daddr_v6, __entry->sock_cookie))

DEFINE_EVENT(tcp_event_sk, tcp_receive_reset, PROTO(struct sock *sk), ARGS(sk))
DEFINE_EVENT(tcp_event_sk, tcp_destroy_sock, PROTO(struct sock *sk), ARGS(sk))
