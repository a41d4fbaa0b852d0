/* SPDX-License-Identifier: GPL-2.0-or-later */
/* TCP: header, state of a connection, and what its files call of one another. */
#ifndef _TCP_H
#define _TCP_H

#include "inet.h"

struct tcphdr {
	__be16 source, dest;
	__be32 seq, ack_seq;
	u8 doff;  /* words in the upper half */
	u8 flags;
	__be16 window;
	__sum16 check;
	__be16 urg_ptr;
};

#define TCPHDR_FIN 0x01
#define TCPHDR_SYN 0x02
#define TCPHDR_RST 0x04
#define TCPHDR_PSH 0x08
#define TCPHDR_ACK 0x10

#define TCP_MSS (LOOPBACK_MTU - sizeof(struct iphdr) - sizeof(struct tcphdr))
#define TCP_WINDOW_MAX 65535U
#define TCP_RTO_MIN (HZ / 5)
#define TCP_FIN_TIMEOUT (60 * HZ)
#define TCP_RETRIES 8
#define TCP_DELAYED (HZ / 20) /* until the next try, where a task has the socket */

/* Of a packet: its place in the stream. */
struct tcp_skb_cb {
	u32 seq, end_seq, ack_seq;
	u8 tcp_flags;
};
#define TCP_SKB_CB(skb) ((struct tcp_skb_cb *)(skb)->cb)

struct tcp_sock {
	struct sock sk;
	u32 rcv_nxt;    /* what comes next */
	u32 copied_seq; /* what is read next */
	u32 rcv_wup;    /* rcv_nxt when a window was last told */
	u32 rcv_wnd;
	u32 snd_una;    /* the first that isn't acknowledged */
	u32 snd_nxt;
	u32 snd_wnd;
	u32 write_seq;  /* behind what was written */
	u32 mss_cache;
	unsigned int retransmits;
	bool timer_is_fin;
	struct timer_list timer;
	unsigned long timeout; /* when it is meant to expire, unless it has to try again */
	struct sk_buff_head rtx_queue; /* sent, and not acknowledged */
};

static __always_inline struct tcp_sock *tcp_sk(const struct sock *sk)
{
	return (struct tcp_sock *)sk;
}

static __always_inline struct tcphdr *tcp_hdr(const struct sk_buff *skb)
{
	return skb_transport_header(skb);
}

static __always_inline bool before(u32 seq1, u32 seq2)
{
	return (s32)(seq1 - seq2) < 0;
}
#define after(seq2, seq1) before(seq1, seq2)

extern struct proto tcp_prot;

/* tcp.c */
unsigned int tcp_poll(struct file *file, struct socket *sock, poll_table *wait);
void tcp_set_state(struct sock *sk, int state);
void tcp_done(struct sock *sk);
void tcp_done_with_error(struct sock *sk, int err);
void tcp_reset(struct sock *sk, int err);
void tcp_init_sock_data(struct sock *sk);
void sk_stream_write_space(struct sock *sk);

/* tcp_ipv4.c */
int tcp_v4_rcv(struct sk_buff *skb);
int tcp_v4_do_rcv(struct sock *sk, struct sk_buff *skb);
int tcp_v4_connect(struct sock *sk, struct sockaddr_in *uaddr);
int tcp_conn_request(struct sock *sk, struct sk_buff *skb);
void tcp_v4_send_check(struct sk_buff *skb, __be32 saddr, __be32 daddr);
u32 secure_tcp_seq(__be32 saddr, __be32 daddr, __be16 sport, __be16 dport);

/* tcp_input.c */
void tcp_rcv_established(struct sock *sk, struct sk_buff *skb);
int tcp_rcv_state_process(struct sock *sk, struct sk_buff *skb);

/* tcp_output.c */
struct sk_buff *tcp_stream_alloc_skb(struct sock *sk, unsigned int size, gfp_t gfp);
void tcp_queue_skb(struct sock *sk, struct sk_buff *skb);
void tcp_write_xmit(struct sock *sk);
void tcp_send_ack(struct sock *sk);
void tcp_send_fin(struct sock *sk);
void tcp_send_active_reset(struct sock *sk, gfp_t priority);
void tcp_send_syn(struct sock *sk, u8 flags);
u32 tcp_select_window(struct sock *sk);
u32 tcp_receive_window(const struct tcp_sock *tp);
u32 tcp_space(const struct sock *sk);

/* tcp_timer.c */
void tcp_init_xmit_timers(struct sock *sk);
void tcp_rearm_rto(struct sock *sk);
void tcp_start_fin_timer(struct sock *sk);
void tcp_clear_xmit_timers(struct sock *sk);

#endif
