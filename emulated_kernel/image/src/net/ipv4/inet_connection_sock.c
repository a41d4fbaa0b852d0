// SPDX-License-Identifier: GPL-2.0-or-later
// Connections: a listening socket's queue of those that are complete.
#include "bug.h"
#include "errno.h"
#include "fs.h"
#include "sched.h"
#include "sock.h"

void sock_init_data(struct sock *sk)
{
	sk->sk_state = TCP_ESTABLISHED;
	sk->sk_ack_backlog = sk->sk_max_ack_backlog = 0;
	spin_lock_init(&sk->sk_lock);
	init_waitqueue_head(&sk->sk_wait);
	INIT_LIST_HEAD(&sk->sk_accept_queue);
	INIT_LIST_HEAD(&sk->sk_node);
}

int inet_csk_listen_start(struct sock *sk, int backlog)
{
	if (backlog < 0 || sk->sk_state == TCP_LISTEN)
		return -EINVAL;
	sk->sk_max_ack_backlog = (u32)backlog;
	sk->sk_state = TCP_LISTEN;
	return 0;
}

struct sock *inet_csk_reqsk_queue_add(struct sock *sk, struct sock *child)
{
	bool room;

	spin_lock(&sk->sk_lock);
	room = sk->sk_state == TCP_LISTEN && sk->sk_ack_backlog <= sk->sk_max_ack_backlog;
	if (room) {
		list_add_tail(&child->sk_node, &sk->sk_accept_queue);
		sk->sk_ack_backlog++;
	}
	spin_unlock(&sk->sk_lock);
	if (!room)
		return NULL;
	wake_up(&sk->sk_wait);
	return child;
}

static noinline struct sock *reqsk_queue_remove(struct sock *sk)
{
	struct sock *child = NULL;

	spin_lock(&sk->sk_lock);
	if (!list_empty(&sk->sk_accept_queue)) {
		child = list_first_entry(&sk->sk_accept_queue, struct sock, sk_node);
		list_del_init(&child->sk_node);
		sk->sk_ack_backlog--;
	}
	spin_unlock(&sk->sk_lock);
	return child;
}

struct sock *inet_csk_accept(struct sock *sk, int flags, int *err, bool kern)
{
	struct sock *child;

	(void)kern;
	*err = -EINVAL;
	if (sk->sk_state != TCP_LISTEN)
		return NULL;
	*err = -EAGAIN;
	if ((flags & O_NONBLOCK) && list_empty(&sk->sk_accept_queue))
		return NULL;
	wait_event(&sk->sk_wait, (child = reqsk_queue_remove(sk)));
	WARN_ON_ONCE(child->sk_state == TCP_LISTEN);
	*err = 0;
	return child;
}
