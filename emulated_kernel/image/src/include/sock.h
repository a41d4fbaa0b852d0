/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Sockets that listen, and the connections that wait to be accepted. */
#ifndef _SOCK_H
#define _SOCK_H

#include "types.h"
#include "wait.h"

#define TCP_ESTABLISHED 1
#define TCP_LISTEN 10

struct sock {
	u8 sk_state;
	u32 sk_ack_backlog;
	u32 sk_max_ack_backlog;
	spinlock_t sk_lock;
	wait_queue_head_t sk_wait;
	struct list_head sk_accept_queue;
	struct list_head sk_node;
};

void sock_init_data(struct sock *sk);
int inet_csk_listen_start(struct sock *sk, int backlog);
struct sock *inet_csk_reqsk_queue_add(struct sock *sk, struct sock *child);
struct sock *inet_csk_accept(struct sock *sk, int flags, int *err, bool kern);

#endif
