// SPDX-License-Identifier: GPL-2.0-or-later
// TCP: what comes in, in each state of a connection.
#include "errno.h"
#include "tcp.h"

/* The other side is done. */
static noinline void tcp_fin(struct sock *sk)
{
	sk->sk_shutdown |= RCV_SHUTDOWN;
	switch (sk->sk_state) {
	case TCP_SYN_RECV:
	case TCP_ESTABLISHED:
		tcp_set_state(sk, TCP_CLOSE_WAIT);
		break;
	case TCP_FIN_WAIT1:
		/* Both at once: ours isn't acknowledged yet. */
		tcp_set_state(sk, TCP_CLOSING);
		break;
	case TCP_FIN_WAIT2:
		/* Linux: TIME_WAIT. Nothing old can come here, where packets keep their order. */
		tcp_send_ack(sk);
		tcp_done(sk);
		break;
	}
	sock_def_wakeup(sk);
}

static noinline void tcp_rcv_space_used(struct sock *sk, struct sk_buff *skb)
{
	skb_set_owner_r(skb, sk);
	__skb_queue_tail(&sk->sk_receive_queue, skb);
}

/* By what was offered; and many small packets take much more memory than they hold data. */
static bool tcp_has_room(const struct sock *sk, const struct sk_buff *skb)
{
	const struct tcp_sock *tp = tcp_sk(sk);

	return !skb->len || (TCP_SKB_CB(skb)->seq + skb->len - tp->rcv_nxt <= tcp_receive_window(tp) &&
			     atomic_read(&sk->sk_rmem_alloc) <= 2 * sk->sk_rcvbuf);
}

/* Deviates: what comes out of order is dropped, and sent again by the other side. Takes over the packet. */
static noinline void tcp_data_queue(struct sock *sk, struct sk_buff *skb)
{
	struct tcp_sock *tp = tcp_sk(sk);
	const struct tcp_skb_cb *tcb = TCP_SKB_CB(skb);
	bool fin = tcb->tcp_flags & TCPHDR_FIN;

	if (skb->len && sk->sk_dead) {
		/* Data for nobody. */
		kfree_skb(skb);
		tcp_send_active_reset(sk, GFP_ATOMIC);
		tcp_done(sk);
		return;
	}
	if (tcb->seq != tp->rcv_nxt || !tcp_has_room(sk, skb)) {
		kfree_skb(skb);
		tcp_send_ack(sk);
		return;
	}
	tp->rcv_nxt = tcb->end_seq;
	if (skb->len) {
		tcp_rcv_space_used(sk, skb);
		sock_def_readable(sk);
	} else {
		consume_skb(skb);
	}
	if (fin)
		tcp_fin(sk);
	if (sk->sk_state != TCP_CLOSE)
		tcp_send_ack(sk);
}

static noinline void tcp_clean_rtx_queue(struct sock *sk)
{
	struct tcp_sock *tp = tcp_sk(sk);
	struct sk_buff *skb;

	while ((skb = skb_peek(&tp->rtx_queue)) && !after(TCP_SKB_CB(skb)->end_seq, tp->snd_una)) {
		__skb_unlink(skb, &tp->rtx_queue);
		sk->sk_wmem_queued -= (int)skb->truesize;
		consume_skb(skb);
	}
}

/* 0 for an acknowledgement of what was never sent. */
static noinline int tcp_ack(struct sock *sk, const struct sk_buff *skb)
{
	struct tcp_sock *tp = tcp_sk(sk);
	u32 ack = TCP_SKB_CB(skb)->ack_seq;

	if (after(ack, tp->snd_nxt))
		return 0;
	if (before(ack, tp->snd_una))
		return 1;
	tp->snd_wnd = ntohs(tcp_hdr(skb)->window);
	if (ack == tp->snd_una)
		return 1;
	tp->snd_una = ack;
	tp->retransmits = 0;
	tcp_clean_rtx_queue(sk);
	tcp_rearm_rto(sk);
	sk_stream_write_space(sk);
	return 1;
}

/* False: the packet needs no more attention, and is still the caller's. */
static noinline bool tcp_validate_incoming(struct sock *sk, struct sk_buff *skb)
{
	const struct tcp_skb_cb *tcb = TCP_SKB_CB(skb);

	if (tcb->tcp_flags & TCPHDR_RST) {
		if (tcb->seq == tcp_sk(sk)->rcv_nxt)
			tcp_reset(sk, sk->sk_state == TCP_CLOSE_WAIT ? EPIPE : ECONNRESET);
		return false;
	}
	if (tcb->tcp_flags & TCPHDR_SYN) {
		tcp_send_ack(sk);
		return false;
	}
	return tcb->tcp_flags & TCPHDR_ACK;
}

static noinline void tcp_data_snd_check(struct sock *sk)
{
	if (skb_peek(&sk->sk_write_queue))
		tcp_write_xmit(sk);
}

void tcp_rcv_established(struct sock *sk, struct sk_buff *skb)
{
	if (!tcp_validate_incoming(sk, skb) || !tcp_ack(sk, skb)) {
		kfree_skb(skb);
		return;
	}
	tcp_data_snd_check(sk);
	if (TCP_SKB_CB(skb)->end_seq != TCP_SKB_CB(skb)->seq)
		tcp_data_queue(sk, skb);
	else
		consume_skb(skb);
}

static noinline void tcp_finish_connect(struct sock *sk)
{
	tcp_set_state(sk, TCP_ESTABLISHED);
	sock_def_wakeup(sk);
}

static noinline int tcp_rcv_synsent_state_process(struct sock *sk, struct sk_buff *skb)
{
	const struct tcp_skb_cb *tcb = TCP_SKB_CB(skb);
	struct tcp_sock *tp = tcp_sk(sk);

	if (!(tcb->tcp_flags & TCPHDR_ACK) || tcb->ack_seq != tp->snd_nxt)
		return 1;
	if (tcb->tcp_flags & TCPHDR_RST) {
		tcp_reset(sk, ECONNREFUSED);
		return 0;
	}
	if (!(tcb->tcp_flags & TCPHDR_SYN))
		return 0;
	tp->rcv_nxt = tp->copied_seq = tcb->seq + 1;
	tp->rcv_wup = tp->rcv_nxt;
	tcp_ack(sk, skb);
	tcp_finish_connect(sk);
	tcp_send_ack(sk);
	return 0;
}

/* Handed to the listener, which may have ended or have no room any more. */
static noinline void tcp_complete_accept(struct sock *sk)
{
	struct sock *listener = sk->sk_listener;

	sk->sk_listener = NULL;
	tcp_set_state(sk, TCP_ESTABLISHED);
	sk->sk_dead = false;
	bh_lock_sock(listener);
	if (!inet_csk_reqsk_queue_add(listener, sk)) {
		sk->sk_dead = true;
		tcp_send_active_reset(sk, GFP_ATOMIC);
		tcp_done(sk);
	}
	bh_unlock_sock(listener);
	sock_put(listener);
}

/* Our FIN is acknowledged. */
static noinline void tcp_fin_acked(struct sock *sk)
{
	switch (sk->sk_state) {
	case TCP_FIN_WAIT1:
		tcp_set_state(sk, TCP_FIN_WAIT2);
		sk->sk_shutdown |= SEND_SHUTDOWN;
		if (sk->sk_dead)
			tcp_start_fin_timer(sk);
		break;
	case TCP_CLOSING:
	case TCP_LAST_ACK:
		tcp_done(sk);
		break;
	}
}

/* 1: nothing of ours, the sender gets a reset. The packet is gone afterwards, unless 1 is returned. */
int tcp_rcv_state_process(struct sock *sk, struct sk_buff *skb)
{
	struct tcp_sock *tp = tcp_sk(sk);

	switch (sk->sk_state) {
	case TCP_CLOSE:
		kfree_skb_reason(skb, SKB_DROP_REASON_TCP_CLOSE);
		return 0;
	case TCP_LISTEN:
		if (TCP_SKB_CB(skb)->tcp_flags & TCPHDR_ACK)
			return 1;
		if ((TCP_SKB_CB(skb)->tcp_flags & (TCPHDR_SYN | TCPHDR_RST)) != TCPHDR_SYN) {
			kfree_skb_reason(skb, SKB_DROP_REASON_TCP_FLAGS);
			return 0;
		}
		tcp_conn_request(sk, skb);
		consume_skb(skb);
		return 0;
	case TCP_SYN_SENT:
		if (tcp_rcv_synsent_state_process(sk, skb))
			return 1;
		consume_skb(skb);
		return 0;
	}
	if (!tcp_validate_incoming(sk, skb) || !tcp_ack(sk, skb)) {
		kfree_skb(skb);
		return 0;
	}
	if (sk->sk_state == TCP_SYN_RECV && tp->snd_una == tp->snd_nxt)
		tcp_complete_accept(sk);
	else if (tp->snd_una == tp->write_seq)
		tcp_fin_acked(sk);
	if (sk->sk_state != TCP_CLOSE)
		tcp_data_snd_check(sk);
	if (sk->sk_state != TCP_CLOSE && TCP_SKB_CB(skb)->end_seq != TCP_SKB_CB(skb)->seq)
		tcp_data_queue(sk, skb);
	else
		consume_skb(skb);
	return 0;
}
