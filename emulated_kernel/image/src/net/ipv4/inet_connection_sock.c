// SPDX-License-Identifier: GPL-2.0-or-later
// Connections: a listening socket's queue of those that are complete.
#include "bug.h"
#include "errno.h"
#include "inet.h"
#include "sched.h"
#include "tcp.h"
#include "tracepoint.h"

int inet_csk_listen_start(struct sock *sk, int backlog)
{
	if (backlog < 0 || sk->sk_state == TCP_LISTEN)
		return -EINVAL;
	sk->sk_max_ack_backlog = (u32)backlog;
	tcp_set_state(sk, TCP_LISTEN);
	return 0;
}

/* Linux: one more than the backlog says. */
bool sk_acceptq_is_full(const struct sock *sk)
{
	return sk->sk_ack_backlog > sk->sk_max_ack_backlog;
}

/* Takes over the reference to the child; NULL where the listener, whose spinlock is held, doesn't take it. */
struct sock *inet_csk_reqsk_queue_add(struct sock *sk, struct sock *child)
{
	if (sk->sk_state != TCP_LISTEN || sk_acceptq_is_full(sk))
		return NULL;
	list_add_tail(&child->sk_accept_node, &sk->sk_accept_queue);
	sk->sk_ack_backlog++;
	sock_def_readable(sk);
	return child;
}

static noinline struct sock *reqsk_queue_remove(struct sock *sk)
{
	struct sock *child = NULL;

	spin_lock_bh(&sk->sk_lock.slock);
	if (!list_empty(&sk->sk_accept_queue)) {
		child = list_first_entry(&sk->sk_accept_queue, struct sock, sk_accept_node);
		list_del_init(&child->sk_accept_node);
		sk->sk_ack_backlog--;
	}
	spin_unlock_bh(&sk->sk_lock.slock);
	return child;
}

/* The socket is locked; it isn't while this waits. */
static noinline int inet_csk_wait_for_connect(struct sock *sk)
{
	release_sock(sk);
	wait_event_interruptible(&sk->sk_wait,
				 !list_empty(&sk->sk_accept_queue) || sk->sk_state != TCP_LISTEN);
	lock_sock(sk);
	return sk->sk_state == TCP_LISTEN ? 0 : -EINVAL;
}

struct sock *inet_csk_accept(struct sock *sk, int flags, int *err, bool kern __attribute__((unused)))
{
	struct sock *child = NULL;

	lock_sock(sk);
	*err = sk->sk_state == TCP_LISTEN ? 0 : -EINVAL;
	while (!*err && !(child = reqsk_queue_remove(sk)))
		*err = flags & O_NONBLOCK ? -EAGAIN : inet_csk_wait_for_connect(sk);
	WARN_ON_ONCE(child && child->sk_state == TCP_LISTEN);
	release_sock(sk);
	return child;
}

/* Nobody will take the connections that are waiting. */
void inet_csk_listen_stop(struct sock *sk)
{
	struct sock *child;

	while ((child = reqsk_queue_remove(sk)))
		child->sk_prot->close(child, 0);
}

/* A connection that nobody has open is over: what it was kept by. */
noinline void inet_csk_destroy_sock(struct sock *sk)
{
	trace_tcp_destroy_sock(sk);
	sock_put(sk);
}
