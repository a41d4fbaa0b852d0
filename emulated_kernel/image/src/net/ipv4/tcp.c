// SPDX-License-Identifier: GPL-2.0-or-later
// TCP as its sockets' users see it: sending, receiving, closing.
#include "tcp.h"
#include "errno.h"
#include "poll.h"
#include "sched.h"
#include "tracepoint.h"

void tcp_init_sock_data(struct sock *sk)
{
	struct tcp_sock *tp = tcp_sk(sk);

	skb_queue_head_init(&tp->rtx_queue);
	tp->mss_cache = TCP_MSS;
	tcp_init_xmit_timers(sk);
}

static int tcp_v4_init_sock(struct sock *sk)
{
	tcp_init_sock_data(sk);
	return 0;
}

noinline void tcp_set_state(struct sock *sk, int state)
{
	trace_inet_sock_set_state(sk, sk->sk_state, state);
	sk->sk_state = (u8)state;
}

static noinline void tcp_write_queue_purge(struct sock *sk)
{
	skb_queue_purge(&tcp_sk(sk)->rtx_queue);
	skb_queue_purge(&sk->sk_write_queue);
	sk->sk_wmem_queued = 0;
}

/* The connection is over: nothing finds it any more. Its user keeps it as long as he likes. */
noinline void tcp_done(struct sock *sk)
{
	struct sock *listener = sk->sk_listener;

	if (sk->sk_state == TCP_CLOSE)
		return;
	tcp_clear_xmit_timers(sk);
	tcp_write_queue_purge(sk);
	tcp_set_state(sk, TCP_CLOSE);
	inet_unhash(sk);
	inet_put_port(sk);
	sk->sk_shutdown = SHUTDOWN_MASK;
	sock_def_wakeup(sk);
	sk->sk_listener = NULL;
	if (listener)
		sock_put(listener);
	if (sk->sk_dead)
		inet_csk_destroy_sock(sk);
}

/* Over by an error, which its user is told. The caller has a reference. */
noinline void tcp_done_with_error(struct sock *sk, int err)
{
	sk->sk_err = err;
	tcp_done(sk);
	if (!sk->sk_dead)
		sk_error_report(sk);
}

/* The other side says so. */
noinline void tcp_reset(struct sock *sk, int err)
{
	trace_tcp_receive_reset(sk);
	tcp_done_with_error(sk, err);
}

void sk_stream_write_space(struct sock *sk)
{
	if (sk->sk_wmem_queued < sk->sk_sndbuf)
		sock_def_wakeup(sk);
}

static bool sk_stream_memory_free(const struct sock *sk)
{
	return sk->sk_wmem_queued < sk->sk_sndbuf;
}

static bool stream_writable(const struct sock *sk)
{
	return sk_stream_memory_free(sk) || sk->sk_err || sk->sk_shutdown & SEND_SHUTDOWN;
}

static noinline void sk_stream_wait_memory(struct sock *sk)
{
	release_sock(sk);
	wait_event_interruptible(&sk->sk_wait, stream_writable(sk));
	lock_sock(sk);
}

static noinline int sk_stream_error(struct sock *sk, unsigned int flags, int err)
{
	if (err != -EPIPE)
		return err;
	if (sk->sk_err)
		err = sock_error(sk);
	if (err == -EPIPE && !(flags & MSG_NOSIGNAL))
		send_sig(SIGPIPE, current, 0);
	return err;
}

static bool may_send(const struct sock *sk)
{
	return TCPF(sk->sk_state) & (TCPF(TCP_ESTABLISHED) | TCPF(TCP_CLOSE_WAIT)) && !sk->sk_err &&
	       !(sk->sk_shutdown & SEND_SHUTDOWN);
}

/* One packet's worth of what is to be sent; bytes, or an error. */
static noinline int tcp_send_some(struct sock *sk, struct msghdr *msg)
{
	size_t size = min(msg->msg_iter.count, (size_t)tcp_sk(sk)->mss_cache);
	struct sk_buff *skb = tcp_stream_alloc_skb(sk, (unsigned int)size, GFP_KERNEL);

	if (!skb)
		return -ENOBUFS;
	if (copy_from_iter(skb_put(skb, (unsigned int)size), size, &msg->msg_iter) != size) {
		kfree_skb(skb);
		return -EFAULT;
	}
	TCP_SKB_CB(skb)->tcp_flags = TCPHDR_ACK | TCPHDR_PSH;
	tcp_queue_skb(sk, skb);
	tcp_write_xmit(sk);
	return (int)size;
}

int tcp_sendmsg_locked(struct sock *sk, struct msghdr *msg, size_t size);
noinline int tcp_sendmsg_locked(struct sock *sk, struct msghdr *msg, size_t size __attribute__((unused)))
{
	int copied = 0, err = 0;

	while (msg->msg_iter.count && !err) {
		if (!may_send(sk))
			err = -EPIPE;
		else if (sk_stream_memory_free(sk))
			err = tcp_send_some(sk, msg);
		else if (msg->msg_flags & MSG_DONTWAIT)
			err = -EAGAIN;
		else
			sk_stream_wait_memory(sk);
		if (err > 0) {
			copied += err;
			err = 0;
		}
	}
	return copied ? copied : sk_stream_error(sk, msg->msg_flags, err);
}

int tcp_sendmsg(struct sock *sk, struct msghdr *msg, size_t size)
{
	int ret;

	lock_sock(sk);
	ret = tcp_sendmsg_locked(sk, msg, size);
	release_sock(sk);
	return ret;
}

static noinline void tcp_eat_recv_skb(struct sock *sk, struct sk_buff *skb)
{
	__skb_unlink(skb, &sk->sk_receive_queue);
	consume_skb(skb);
}

/* Tells the other side where there is much more room than it knows of. */
static noinline void tcp_cleanup_rbuf(struct sock *sk, int copied)
{
	u32 known = tcp_receive_window(tcp_sk(sk));

	if (copied > 0 && !(sk->sk_shutdown & RCV_SHUTDOWN) &&
	    min(tcp_space(sk), TCP_WINDOW_MAX) >= 2 * known + TCP_MSS)
		tcp_send_ack(sk);
}

static noinline int tcp_copy_skb(struct sock *sk, struct sk_buff *skb, struct msghdr *msg)
{
	struct tcp_sock *tp = tcp_sk(sk);
	u32 offset = tp->copied_seq - TCP_SKB_CB(skb)->seq;
	size_t used = min(msg->msg_iter.count, (size_t)(skb->len - offset));

	if (copy_to_iter(skb->data + offset, used, &msg->msg_iter) != used)
		return -EFAULT;
	tp->copied_seq += (u32)used;
	trace_skb_copy_datagram_iovec(skb, (int)used);
	if (offset + used == skb->len)
		tcp_eat_recv_skb(sk, skb);
	return (int)used;
}

/* What is to be done without data: an errno, 0 for the end, 1 to wait. */
static int nothing_to_read(struct sock *sk, int flags)
{
	if (sk->sk_err)
		return sock_error(sk);
	if (sk->sk_shutdown & RCV_SHUTDOWN)
		return 0;
	if (sk->sk_state == TCP_CLOSE || sk->sk_state == TCP_LISTEN)
		return -ENOTCONN;
	return flags & MSG_DONTWAIT ? -EAGAIN : 1;
}

static noinline int tcp_recvmsg_locked(struct sock *sk, struct msghdr *msg, size_t len, int flags)
{
	struct sk_buff *skb;
	int copied = 0, err = 1;

	while (msg->msg_iter.count && (size_t)copied < len) {
		skb = skb_peek(&sk->sk_receive_queue);
		if (skb) {
			err = tcp_copy_skb(sk, skb, msg);
			if (err < 0)
				break;
			copied += err;
			continue;
		}
		err = copied ? 0 : nothing_to_read(sk, flags);
		if (err <= 0)
			break;
		sk_wait_data(sk);
	}
	tcp_cleanup_rbuf(sk, copied);
	return copied ? copied : min(err, 0);
}

int tcp_recvmsg(struct sock *sk, struct msghdr *msg, size_t len, int flags,
		int *addr_len __attribute__((unused)))
{
	int ret;

	if (sk->sk_state == TCP_LISTEN)
		return -ENOTCONN;
	lock_sock(sk);
	ret = tcp_recvmsg_locked(sk, msg, len, flags);
	release_sock(sk);
	return ret;
}

unsigned int tcp_poll(struct file *file, struct socket *sock, poll_table *wait)
{
	struct sock *sk = sock->sk;
	unsigned int mask = 0;

	poll_wait(file, &sk->sk_wait, wait);
	if (sk->sk_state == TCP_LISTEN)
		return list_empty(&sk->sk_accept_queue) ? 0 : EPOLLIN | EPOLLRDNORM;
	if (sk->sk_shutdown == SHUTDOWN_MASK || sk->sk_state == TCP_CLOSE)
		mask |= EPOLLHUP;
	if (skb_peek(&sk->sk_receive_queue) || sk->sk_shutdown & RCV_SHUTDOWN)
		mask |= EPOLLIN | EPOLLRDNORM;
	if (may_send(sk) && sk_stream_memory_free(sk))
		mask |= EPOLLOUT | EPOLLWRNORM;
	return sk->sk_err ? mask | EPOLLERR : mask;
}

/* Whether a FIN is to be sent. */
static noinline bool tcp_close_state(struct sock *sk)
{
	switch (sk->sk_state) {
	case TCP_SYN_RECV:
	case TCP_ESTABLISHED:
		tcp_set_state(sk, TCP_FIN_WAIT1);
		return true;
	case TCP_CLOSE_WAIT:
		tcp_set_state(sk, TCP_LAST_ACK);
		return true;
	default:
		return false;
	}
}

static void tcp_shutdown(struct sock *sk, int how)
{
	if (how & SEND_SHUTDOWN && tcp_close_state(sk))
		tcp_send_fin(sk);
}

static noinline void __tcp_close(struct sock *sk)
{
	bool unread = skb_peek(&sk->sk_receive_queue);

	sk->sk_shutdown = SHUTDOWN_MASK;
	skb_queue_purge(&sk->sk_receive_queue);
	if (sk->sk_state == TCP_LISTEN) {
		/* Before its children: none may come any more. */
		tcp_set_state(sk, TCP_CLOSE);
		inet_unhash(sk);
		inet_csk_listen_stop(sk);
		sock_def_wakeup(sk);
	} else if (sk->sk_state == TCP_SYN_SENT) {
		tcp_done(sk);
	} else if (unread && sk->sk_state != TCP_CLOSE) {
		tcp_send_active_reset(sk, GFP_KERNEL);
		tcp_done(sk);
	} else if (tcp_close_state(sk)) {
		tcp_send_fin(sk);
	}
}

/*
 * What is still to be sent is sent; the user's reference passes to the connection, which gives it back in
 * tcp_done().
 */
static void tcp_close(struct sock *sk, long timeout __attribute__((unused)))
{
	lock_sock(sk);
	sock_hold(sk);
	__tcp_close(sk);
	release_sock(sk);
	spin_lock_bh(&sk->sk_lock.slock);
	sk->sk_socket = NULL;
	sk->sk_dead = true;
	if (sk->sk_state == TCP_FIN_WAIT2)
		tcp_start_fin_timer(sk);
	if (sk->sk_state == TCP_CLOSE) {
		inet_put_port(sk);
		inet_csk_destroy_sock(sk);
	}
	spin_unlock_bh(&sk->sk_lock.slock);
	sock_put(sk);
}

struct proto tcp_prot = {
	.name = "TCP",
	.obj_size = sizeof(struct tcp_sock),
	.close = tcp_close,
	.connect = tcp_v4_connect,
	.init = tcp_v4_init_sock,
	.shutdown = tcp_shutdown,
	.sendmsg = tcp_sendmsg,
	.recvmsg = tcp_recvmsg,
	.backlog_rcv = tcp_v4_do_rcv,
	.get_port = inet_csk_get_port,
	.unhash = inet_unhash,
};
