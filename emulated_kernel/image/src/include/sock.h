/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The protocol's side of a socket. */
#ifndef _SOCK_H
#define _SOCK_H

#include "net.h"
#include "skbuff.h"
#include "timer.h"

enum {
	TCP_ESTABLISHED = 1, TCP_SYN_SENT, TCP_SYN_RECV, TCP_FIN_WAIT1, TCP_FIN_WAIT2, TCP_TIME_WAIT,
	TCP_CLOSE, TCP_CLOSE_WAIT, TCP_LAST_ACK, TCP_LISTEN, TCP_CLOSING, TCP_NEW_SYN_RECV,
};
#define TCPF(state) (1 << (state))

#define RCV_SHUTDOWN 1
#define SEND_SHUTDOWN 2
#define SHUTDOWN_MASK 3
#define SK_BUF_DEFAULT (128 << 10)

/* A task's lock, and a softirq's beside it; while a task has the socket, packets for it wait in its backlog. */
typedef struct {
	spinlock_t slock;
	int owned;
	wait_queue_head_t wq;
} socket_lock_t;

struct proto;

struct sock {
	struct hlist_node sk_node;       /* in the table that packets are looked up in */
	struct hlist_node sk_bind_node;  /* in that of ports */
	__be32 sk_daddr, sk_rcv_saddr;
	__be16 sk_dport;
	u16 sk_num;
	__be16 sk_sport;                 /* that of sk_num, which an end sets to 0 */
	volatile u8 sk_state;
	u8 sk_shutdown;
	u8 sk_protocol;
	bool sk_dead;                    /* nobody has it open: the connection itself has the reference */
	int sk_err;
	atomic_t sk_refcnt;
	u32 sk_cookie;                   /* 0: nobody has asked for it */
	const struct proto *sk_prot;
	socket_lock_t sk_lock;
	struct sk_buff_head sk_receive_queue, sk_write_queue, sk_backlog;
	atomic_t sk_rmem_alloc;
	int sk_wmem_queued;
	int sk_sndbuf, sk_rcvbuf;
	wait_queue_head_t sk_wait;
	struct socket *sk_socket;
	u32 sk_ack_backlog, sk_max_ack_backlog;
	struct list_head sk_accept_queue, sk_accept_node;
	struct sock *sk_listener;
};

struct proto {
	const char *name;
	unsigned int obj_size;
	struct kmem_cache *slab;
	void (*close)(struct sock *sk, long timeout);
	int (*connect)(struct sock *sk, struct sockaddr_in *uaddr);
	int (*init)(struct sock *sk);
	void (*shutdown)(struct sock *sk, int how);
	int (*sendmsg)(struct sock *sk, struct msghdr *msg, size_t len);
	int (*recvmsg)(struct sock *sk, struct msghdr *msg, size_t len, int flags, int *addr_len);
	int (*backlog_rcv)(struct sock *sk, struct sk_buff *skb);
	int (*get_port)(struct sock *sk, unsigned short snum);
	void (*unhash)(struct sock *sk);
};

int proto_register(struct proto *prot);
struct sock *sk_alloc(struct proto *prot, gfp_t priority);
void sock_init_data(struct socket *sock, struct sock *sk);
void sk_free(struct sock *sk);
void lock_sock_nested(struct sock *sk, int subclass);
#define lock_sock(sk) lock_sock_nested(sk, 0)
void release_sock(struct sock *sk);
void sk_add_backlog(struct sock *sk, struct sk_buff *skb);
void skb_set_owner_r(struct sk_buff *skb, struct sock *sk);
int sock_queue_rcv_skb(struct sock *sk, struct sk_buff *skb);
struct sk_buff *skb_recv_datagram(struct sock *sk, unsigned int flags, int *err);
void sock_def_wakeup(struct sock *sk);
void sock_def_readable(struct sock *sk);
int sock_error(struct sock *sk);
void sk_error_report(struct sock *sk);
u64 sock_gen_cookie(struct sock *sk);
int sk_wait_data(struct sock *sk);

#define bh_lock_sock(sk) spin_lock(&(sk)->sk_lock.slock)
#define bh_unlock_sock(sk) spin_unlock(&(sk)->sk_lock.slock)
#define sock_owned_by_user(sk) ((sk)->sk_lock.owned)

static __always_inline void sock_hold(struct sock *sk)
{
	atomic_inc(&sk->sk_refcnt);
}

static __always_inline void sock_put(struct sock *sk)
{
	if (atomic_dec_and_test(&sk->sk_refcnt))
		sk_free(sk);
}

#endif
