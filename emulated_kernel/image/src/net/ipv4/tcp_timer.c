// SPDX-License-Identifier: GPL-2.0-or-later
// TCP: what isn't acknowledged in time is sent again; a side that never ends isn't waited for.
#include "errno.h"
#include "tcp.h"

int tcp_retransmit_skb(struct sock *sk);

static noinline void tcp_write_err(struct sock *sk)
{
	tcp_done_with_error(sk, ETIMEDOUT);
}

static noinline void tcp_retransmit_timer(struct sock *sk)
{
	struct tcp_sock *tp = tcp_sk(sk);

	if (!skb_peek(&tp->rtx_queue) && !skb_peek(&sk->sk_write_queue))
		return;
	if (++tp->retransmits > TCP_RETRIES) {
		tcp_write_err(sk);
		return;
	}
	tcp_retransmit_skb(sk);
	tcp_rearm_rto(sk);
}

/* The timer has a reference. */
static void start_timer(struct sock *sk, unsigned long expires)
{
	if (!mod_timer(&tcp_sk(sk)->timer, expires))
		sock_hold(sk);
}

/* Whoever has the socket may set the timer anew, on another CPU, after it has expired and before this runs. */
static noinline void tcp_write_timer(struct timer_list *t)
{
	struct sock *sk = &container_of(t, struct tcp_sock, timer)->sk;
	unsigned long timeout;

	bh_lock_sock(sk);
	timeout = READ_ONCE(tcp_sk(sk)->timeout);
	if (sock_owned_by_user(sk))
		start_timer(sk, jiffies + TCP_DELAYED);
	else if (!time_after_eq(jiffies, timeout))
		start_timer(sk, timeout);
	else if (tcp_sk(sk)->timer_is_fin)
		tcp_done(sk);
	else
		tcp_retransmit_timer(sk);
	bh_unlock_sock(sk);
	sock_put(sk);
}

void tcp_init_xmit_timers(struct sock *sk)
{
	timer_setup(&tcp_sk(sk)->timer, tcp_write_timer);
}

static void reset_timer(struct sock *sk, unsigned long delay)
{
	WRITE_ONCE(tcp_sk(sk)->timeout, jiffies + delay);
	start_timer(sk, tcp_sk(sk)->timeout);
}

void tcp_rearm_rto(struct sock *sk)
{
	struct tcp_sock *tp = tcp_sk(sk);

	if (tp->timer_is_fin)
		reset_timer(sk, TCP_FIN_TIMEOUT);
	else if (skb_peek(&tp->rtx_queue) || skb_peek(&sk->sk_write_queue))
		reset_timer(sk, TCP_RTO_MIN << min(tp->retransmits, 6U));
	else
		tcp_clear_xmit_timers(sk);
}

void tcp_start_fin_timer(struct sock *sk)
{
	tcp_sk(sk)->timer_is_fin = true;
	tcp_rearm_rto(sk);
}

void tcp_clear_xmit_timers(struct sock *sk)
{
	if (del_timer(&tcp_sk(sk)->timer))
		sock_put(sk);
}
