/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Sockets as files: what system calls work on, and the operations of a family below them. */
#ifndef _NET_H
#define _NET_H

#include "checksum.h"
#include "fs.h"

#define AF_UNSPEC 0
#define AF_INET 2
#define SOCK_STREAM 1
#define SOCK_DGRAM 2
#define SOCK_NONBLOCK O_NONBLOCK
#define SOCK_CLOEXEC O_CLOEXEC
#define SOCK_TYPE_MASK 0xf
#define IPPROTO_ICMP 1
#define IPPROTO_TCP 6
#define IPPROTO_UDP 17
#define SHUT_RDWR 2
#define MSG_DONTWAIT 0x40
#define MSG_NOSIGNAL 0x4000
#define SOMAXCONN 4096

struct sock;

struct sockaddr {
	u16 sa_family;
	char sa_data[14];
};

struct sockaddr_in {
	u16 sin_family;
	__be16 sin_port;
	__be32 sin_addr;
	u8 zero[8];
};

struct msghdr {
	struct sockaddr_in *msg_name; /* NULL: none is given or wanted */
	int msg_namelen;
	unsigned int msg_flags;
	struct iov_iter msg_iter;
};

struct proto_ops;

enum { SS_UNCONNECTED = 1, SS_CONNECTING, SS_CONNECTED };

struct socket {
	int state;
	short type;
	struct file *file;
	struct sock *sk;
	const struct proto_ops *ops;
};

struct proto_ops {
	int (*release)(struct socket *sock);
	int (*bind)(struct socket *sock, struct sockaddr *uaddr, int addr_len);
	int (*connect)(struct socket *sock, struct sockaddr *uaddr, int addr_len, int flags);
	int (*accept)(struct socket *sock, struct socket *newsock, int flags, bool kern);
	int (*getname)(struct socket *sock, struct sockaddr *uaddr, int peer);
	unsigned int (*poll)(struct file *file, struct socket *sock, poll_table *wait);
	int (*listen)(struct socket *sock, int backlog);
	int (*shutdown)(struct socket *sock, int how);
	int (*sendmsg)(struct socket *sock, struct msghdr *msg, size_t size);
	int (*recvmsg)(struct socket *sock, struct msghdr *msg, size_t size, int flags);
};

extern const struct proto_ops inet_stream_ops, inet_dgram_ops;

void sock_init(void);
int inet_create(struct socket *sock, int protocol, int kern);
int sock_create_kern(int family, int type, int protocol, struct socket **res);
void sock_release(struct socket *sock);
int sock_sendmsg(struct socket *sock, struct msghdr *msg);
int sock_recvmsg(struct socket *sock, struct msghdr *msg, int flags);
int kernel_bind(struct socket *sock, struct sockaddr *addr, int addrlen);
int kernel_listen(struct socket *sock, int backlog);
int kernel_accept(struct socket *sock, struct socket **newsock, int flags);
int kernel_connect(struct socket *sock, struct sockaddr *addr, int addrlen, int flags);
int kernel_getsockname(struct socket *sock, struct sockaddr *addr);
int kernel_sock_shutdown(struct socket *sock, int how);

#endif
