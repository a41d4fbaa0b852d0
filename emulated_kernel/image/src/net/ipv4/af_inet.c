// SPDX-License-Identifier: GPL-2.0-or-later
// The sockets of the internet's protocols: which protocol, which address, which state.
#include "errno.h"
#include "inet.h"
#include "poll.h"
#include "printk.h"
#include "sched.h"
#include "tcp.h"

static const struct inet_protosw {
	int type, protocol;
	struct proto *prot;
	const struct proto_ops *ops;
} inetsw[] = {
	{ SOCK_STREAM, IPPROTO_TCP, &tcp_prot, &inet_stream_ops },
	{ SOCK_DGRAM, IPPROTO_UDP, &udp_prot, &inet_dgram_ops },
	{ SOCK_DGRAM, IPPROTO_ICMP, &ping_prot, &inet_dgram_ops },
};

static const struct inet_protosw *find_protosw(int type, int protocol)
{
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(inetsw); i++)
		if (inetsw[i].type == type && (!protocol || inetsw[i].protocol == protocol))
			return &inetsw[i];
	return NULL;
}

int inet_create(struct socket *sock, int protocol, int kern __attribute__((unused)))
{
	const struct inet_protosw *answer = find_protosw(sock->type, protocol);
	struct sock *sk;

	if (!answer)
		return -EPROTONOSUPPORT;
	sk = sk_alloc(answer->prot, GFP_KERNEL);
	if (!sk)
		return -ENOBUFS;
	sock->ops = answer->ops;
	sock->state = SS_UNCONNECTED;
	sock_init_data(sock, sk);
	sk->sk_protocol = (u8)answer->protocol;
	return sk->sk_prot->init ? sk->sk_prot->init(sk) : 0;
}

static int inet_release(struct socket *sock)
{
	struct sock *sk = sock->sk;

	sock->sk = NULL;
	if (sk)
		sk->sk_prot->close(sk, 0);
	return 0;
}

int inet_autobind(struct sock *sk)
{
	int err = 0;

	lock_sock(sk);
	if (!sk->sk_num)
		err = sk->sk_prot->get_port(sk, 0);
	release_sock(sk);
	return err ? -EAGAIN : 0;
}

static int inet_bind(struct socket *sock, struct sockaddr *uaddr, int addr_len)
{
	const struct sockaddr_in *addr = (struct sockaddr_in *)uaddr;
	struct sock *sk = sock->sk;
	int err = -EINVAL;

	if (addr_len < (int)sizeof(*addr))
		return -EINVAL;
	if (addr->sin_family != AF_INET)
		return -EAFNOSUPPORT;
	if (addr->sin_addr && !ip_route_output(addr->sin_addr))
		return -EADDRNOTAVAIL;
	lock_sock(sk);
	if (!sk->sk_num && sk->sk_state == TCP_CLOSE) {
		sk->sk_rcv_saddr = addr->sin_addr;
		err = sk->sk_prot->get_port(sk, ntohs(addr->sin_port));
	}
	release_sock(sk);
	return err;
}

static int inet_listen(struct socket *sock, int backlog)
{
	struct sock *sk = sock->sk;
	int err = 0;

	if (sock->type != SOCK_STREAM)
		return -EOPNOTSUPP;
	backlog = min((unsigned int)backlog, (unsigned int)SOMAXCONN);
	lock_sock(sk);
	if (sk->sk_state == TCP_LISTEN) {
		sk->sk_max_ack_backlog = (u32)backlog;
	} else if (sk->sk_state != TCP_CLOSE) {
		err = -EINVAL;
	} else {
		if (!sk->sk_num)
			err = sk->sk_prot->get_port(sk, 0);
		if (!err)
			err = inet_csk_listen_start(sk, backlog);
		if (!err)
			inet_hash(sk);
	}
	release_sock(sk);
	return err;
}

static int inet_accept(struct socket *sock, struct socket *newsock, int flags, bool kern)
{
	int err;
	struct sock *child = inet_csk_accept(sock->sk, flags, &err, kern);

	if (!child)
		return err;
	lock_sock(child);
	child->sk_socket = newsock;
	newsock->sk = child;
	newsock->state = SS_CONNECTED;
	release_sock(child);
	return 0;
}

static bool connection_is_decided(const struct sock *sk)
{
	return !(TCPF(sk->sk_state) & (TCPF(TCP_SYN_SENT) | TCPF(TCP_SYN_RECV)));
}

static noinline int inet_wait_for_connect(struct sock *sk)
{
	release_sock(sk);
	wait_event_interruptible(&sk->sk_wait, connection_is_decided(sk));
	lock_sock(sk);
	if (sk->sk_state != TCP_CLOSE)
		return 0;
	return sk->sk_err ? sock_error(sk) : -ECONNABORTED;
}

static noinline int __inet_stream_connect(struct socket *sock, struct sockaddr_in *addr, int flags)
{
	struct sock *sk = sock->sk;
	int err;

	if (sock->state == SS_CONNECTED)
		return -EISCONN;
	if (sock->state == SS_UNCONNECTED) {
		if (sk->sk_state != TCP_CLOSE)
			return -EISCONN;
		err = sk->sk_prot->connect(sk, addr);
		if (err)
			return err;
		sock->state = SS_CONNECTING;
		if (flags & O_NONBLOCK && !connection_is_decided(sk))
			return -EINPROGRESS;
	} else if (flags & O_NONBLOCK && !connection_is_decided(sk)) {
		return -EALREADY;
	}
	err = inet_wait_for_connect(sk);
	sock->state = err ? SS_UNCONNECTED : SS_CONNECTED;
	return err;
}

static int check_address(const struct sockaddr *uaddr, int addr_len)
{
	if (addr_len < (int)sizeof(struct sockaddr_in))
		return -EINVAL;
	return uaddr->sa_family == AF_INET ? 0 : -EAFNOSUPPORT;
}

static int inet_stream_connect(struct socket *sock, struct sockaddr *uaddr, int addr_len, int flags)
{
	int err = check_address(uaddr, addr_len);

	if (err)
		return err;
	lock_sock(sock->sk);
	err = __inet_stream_connect(sock, (struct sockaddr_in *)uaddr, flags);
	release_sock(sock->sk);
	return err;
}

static int inet_dgram_connect(struct socket *sock, struct sockaddr *uaddr, int addr_len,
			      int flags __attribute__((unused)))
{
	struct sock *sk = sock->sk;
	int err = check_address(uaddr, addr_len);

	if (!err && !sk->sk_num)
		err = inet_autobind(sk);
	if (err)
		return err;
	lock_sock(sk);
	err = sk->sk_prot->connect(sk, (struct sockaddr_in *)uaddr);
	release_sock(sk);
	return err;
}

static int inet_getname(struct socket *sock, struct sockaddr *uaddr, int peer)
{
	const struct sock *sk = sock->sk;

	if (peer && (!sk->sk_dport || sk->sk_state == TCP_CLOSE || sk->sk_state == TCP_SYN_SENT))
		return -ENOTCONN;
	*(struct sockaddr_in *)uaddr = (struct sockaddr_in){
		.sin_family = AF_INET,
		.sin_port = peer ? sk->sk_dport : htons(sk->sk_num),
		.sin_addr = peer ? sk->sk_daddr : sk->sk_rcv_saddr,
	};
	return sizeof(struct sockaddr_in);
}

static int inet_sendmsg(struct socket *sock, struct msghdr *msg, size_t size)
{
	return sock->sk->sk_prot->sendmsg(sock->sk, msg, size);
}

static int inet_recvmsg(struct socket *sock, struct msghdr *msg, size_t size, int flags)
{
	return sock->sk->sk_prot->recvmsg(sock->sk, msg, size, flags, &msg->msg_namelen);
}

static int inet_shutdown(struct socket *sock, int how)
{
	struct sock *sk = sock->sk;
	int err = 0;

	how++;
	if (how & ~SHUTDOWN_MASK || !how)
		return -EINVAL;
	lock_sock(sk);
	if (sk->sk_state == TCP_CLOSE || sk->sk_state == TCP_LISTEN || sk->sk_state == TCP_SYN_SENT) {
		err = -ENOTCONN;
	} else {
		sk->sk_shutdown |= (u8)how;
		sk->sk_prot->shutdown(sk, how);
		sock_def_wakeup(sk);
	}
	release_sock(sk);
	return err;
}

static unsigned int datagram_poll(struct file *file, struct socket *sock, poll_table *wait)
{
	struct sock *sk = sock->sk;
	unsigned int mask = EPOLLOUT | EPOLLWRNORM;

	poll_wait(file, &sk->sk_wait, wait);
	if (sk->sk_err)
		mask |= EPOLLERR;
	if (skb_peek(&sk->sk_receive_queue) || sk->sk_shutdown & RCV_SHUTDOWN)
		mask |= EPOLLIN | EPOLLRDNORM;
	return mask;
}

const struct proto_ops inet_stream_ops = {
	.release = inet_release,
	.bind = inet_bind,
	.connect = inet_stream_connect,
	.accept = inet_accept,
	.getname = inet_getname,
	.poll = tcp_poll,
	.listen = inet_listen,
	.shutdown = inet_shutdown,
	.sendmsg = inet_sendmsg,
	.recvmsg = inet_recvmsg,
};

const struct proto_ops inet_dgram_ops = {
	.release = inet_release,
	.bind = inet_bind,
	.connect = inet_dgram_connect,
	.getname = inet_getname,
	.poll = datagram_poll,
	.listen = inet_listen,
	.shutdown = inet_shutdown,
	.sendmsg = inet_sendmsg,
	.recvmsg = inet_recvmsg,
};

static const struct net_protocol tcp_protocol = { .handler = tcp_v4_rcv };
static const struct net_protocol udp_protocol = { .handler = udp_rcv, .err_handler = udp_err };
static const struct net_protocol icmp_protocol = { .handler = icmp_rcv };

__init void inet_init(void)
{
	static struct packet_type ip_packet_type = { .type = htons(ETH_P_IP), .func = ip_rcv };
	unsigned int i;

	for (i = 0; i < ARRAY_SIZE(inetsw); i++)
		if (proto_register(inetsw[i].prot))
			panic("inet_init: no memory for %s", inetsw[i].prot->name);
	inet_add_protocol(&icmp_protocol, IPPROTO_ICMP);
	inet_add_protocol(&udp_protocol, IPPROTO_UDP);
	inet_add_protocol(&tcp_protocol, IPPROTO_TCP);
	dev_add_pack(&ip_packet_type);
}
