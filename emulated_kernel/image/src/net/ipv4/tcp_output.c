// SPDX-License-Identifier: GPL-2.0-or-later
// TCP: what is sent, and when.
#include "errno.h"
#include "mm.h"
#include "string.h"
#include "tcp.h"
#include "tracepoint.h"

/* Room for the reader in the receive buffer. */
u32 tcp_space(const struct sock *sk)
{
	int space = sk->sk_rcvbuf - atomic_read(&sk->sk_rmem_alloc);

	return space > 0 ? (u32)space : 0;
}

u32 tcp_receive_window(const struct tcp_sock *tp)
{
	s32 win = (s32)(tp->rcv_wup + tp->rcv_wnd - tp->rcv_nxt);

	return win > 0 ? (u32)win : 0;
}

/* What was offered once isn't taken back. */
u32 tcp_select_window(struct sock *sk)
{
	struct tcp_sock *tp = tcp_sk(sk);
	u32 window = min(tcp_space(sk), TCP_WINDOW_MAX);

	window = max(window, tcp_receive_window(tp));
	tp->rcv_wnd = window;
	tp->rcv_wup = tp->rcv_nxt;
	return window;
}

static noinline int __tcp_transmit_skb(struct sock *sk, struct sk_buff *skb, u32 rcv_nxt)
{
	struct tcp_skb_cb *tcb = TCP_SKB_CB(skb);
	struct tcphdr *th = skb_push(skb, sizeof(*th));

	skb_reset_transport_header(skb);
	*th = (struct tcphdr){
		.source = htons(sk->sk_num),
		.dest = sk->sk_dport,
		.seq = htonl(tcb->seq),
		.ack_seq = tcb->tcp_flags & TCPHDR_ACK ? htonl(rcv_nxt) : 0,
		.doff = sizeof(*th) / 4 << 4,
		.flags = tcb->tcp_flags,
		.window = htons(tcp_select_window(sk)),
	};
	tcp_v4_send_check(skb, sk->sk_rcv_saddr, sk->sk_daddr);
	return ip_queue_xmit(sk, skb, NULL);
}

/* The queue keeps its packet; a copy goes while headers of an earlier one may still be read. */
static noinline int tcp_transmit_skb(struct sock *sk, struct sk_buff *skb, int clone_it, gfp_t gfp_mask)
{
	if (clone_it)
		skb = skb_cloned(skb) ? skb_copy(skb, gfp_mask) : skb_clone(skb, gfp_mask);
	if (unlikely(!skb))
		return -ENOBUFS;
	return __tcp_transmit_skb(sk, skb, tcp_sk(sk)->rcv_nxt);
}

struct sk_buff *tcp_stream_alloc_skb(struct sock *sk __attribute__((unused)), unsigned int size, gfp_t gfp)
{
	struct sk_buff *skb = alloc_skb(size + MAX_HEADER, gfp);

	if (skb)
		skb_reserve(skb, MAX_HEADER);
	return skb;
}

/* Gives a packet its place in the stream; SYN and FIN take one each. */
void tcp_queue_skb(struct sock *sk, struct sk_buff *skb)
{
	struct tcp_sock *tp = tcp_sk(sk);
	struct tcp_skb_cb *tcb = TCP_SKB_CB(skb);

	tcb->seq = tp->write_seq;
	tcb->end_seq = tcb->seq + skb->len + !!(tcb->tcp_flags & (TCPHDR_SYN | TCPHDR_FIN));
	tp->write_seq = tcb->end_seq;
	sk->sk_wmem_queued += (int)skb->truesize;
	__skb_queue_tail(&sk->sk_write_queue, skb);
}

static noinline void tcp_event_new_data_sent(struct sock *sk, struct sk_buff *skb)
{
	struct tcp_sock *tp = tcp_sk(sk);

	tp->snd_nxt = TCP_SKB_CB(skb)->end_seq;
	__skb_unlink(skb, &sk->sk_write_queue);
	__skb_queue_tail(&tp->rtx_queue, skb);
	if (!timer_pending(&tp->timer))
		tcp_rearm_rto(sk);
}

static bool tcp_snd_wnd_test(const struct tcp_sock *tp, const struct sk_buff *skb)
{
	return !skb->len || !after(TCP_SKB_CB(skb)->end_seq, tp->snd_una + tp->snd_wnd);
}

/* As far as the other side has room. A timer asks again where it has none. */
void tcp_write_xmit(struct sock *sk)
{
	struct tcp_sock *tp = tcp_sk(sk);
	struct sk_buff *skb;

	while ((skb = skb_peek(&sk->sk_write_queue))) {
		if (!tcp_snd_wnd_test(tp, skb)) {
			if (!timer_pending(&tp->timer))
				tcp_rearm_rto(sk);
			break;
		}
		/* Before it goes: its acknowledgement may be here when the call returns. */
		tcp_event_new_data_sent(sk, skb);
		tcp_transmit_skb(sk, skb, 1, GFP_ATOMIC);
	}
}

static struct sk_buff *tcp_control_skb(u8 flags, u32 seq)
{
	struct sk_buff *skb = tcp_stream_alloc_skb(NULL, 0, GFP_ATOMIC);

	if (skb)
		*TCP_SKB_CB(skb) = (struct tcp_skb_cb){ .seq = seq, .end_seq = seq, .tcp_flags = flags };
	return skb;
}

static noinline void __tcp_send_ack(struct sock *sk, u32 rcv_nxt)
{
	struct sk_buff *skb = tcp_control_skb(TCPHDR_ACK, tcp_sk(sk)->snd_nxt);

	if (skb)
		__tcp_transmit_skb(sk, skb, rcv_nxt);
}

void tcp_send_ack(struct sock *sk)
{
	if (sk->sk_state != TCP_CLOSE)
		__tcp_send_ack(sk, tcp_sk(sk)->rcv_nxt);
}

/* The first packet of either side. */
void tcp_send_syn(struct sock *sk, u8 flags)
{
	struct sk_buff *skb = tcp_control_skb(flags, 0);

	if (!skb)
		return;
	tcp_queue_skb(sk, skb);
	tcp_write_xmit(sk);
}

void tcp_send_fin(struct sock *sk)
{
	struct sk_buff *skb = tcp_control_skb(TCPHDR_FIN | TCPHDR_ACK, 0);

	if (!skb)
		return;
	tcp_queue_skb(sk, skb);
	tcp_write_xmit(sk);
}

void tcp_send_active_reset(struct sock *sk, gfp_t priority __attribute__((unused)))
{
	struct sk_buff *skb = tcp_control_skb(TCPHDR_RST | TCPHDR_ACK, tcp_sk(sk)->snd_nxt);

	if (!skb)
		return;
	tcp_transmit_skb(sk, skb, 0, GFP_ATOMIC);
	trace_tcp_send_reset(sk, NULL);
}

/* The oldest packet once more, or the first of those that have no room. */
int tcp_retransmit_skb(struct sock *sk);
noinline int tcp_retransmit_skb(struct sock *sk)
{
	struct tcp_sock *tp = tcp_sk(sk);
	struct sk_buff *skb = skb_peek(&tp->rtx_queue);

	if (skb) {
		trace_tcp_retransmit_skb(sk, skb);
		return tcp_transmit_skb(sk, skb, 1, GFP_ATOMIC);
	}
	skb = skb_peek(&sk->sk_write_queue);
	if (!skb)
		return 0;
	tcp_event_new_data_sent(sk, skb);
	return tcp_transmit_skb(sk, skb, 1, GFP_ATOMIC);
}
