// SPDX-License-Identifier: GPL-2.0-or-later
// Workloads on sockets: connections, datagrams, echoes.
#include "load.h"
#include "errno.h"
#include "freezer.h"
#include "inet.h"
#include "mm.h"
#include "printk.h"
#include "sched.h"
#include "string.h"

static int sock_send(struct socket *sock, const void *buf, size_t len, struct sockaddr_in *to)
{
	struct msghdr msg = { .msg_name = to };

	iov_iter_kbuf(&msg.msg_iter, true, (void *)buf, len);
	return sock_sendmsg(sock, &msg);
}

static int sock_receive(struct socket *sock, void *buf, size_t len, struct sockaddr_in *from)
{
	struct msghdr msg = { .msg_name = from };

	iov_iter_kbuf(&msg.msg_iter, false, buf, len);
	return sock_recvmsg(sock, &msg, 0);
}

/* At any free port of the loopback address, which *addr becomes. */
static noinline int load_bind(struct socket *sock, struct sockaddr_in *addr)
{
	int err;

	*addr = (struct sockaddr_in){ .sin_family = AF_INET, .sin_addr = htonl(INADDR_LOOPBACK) };
	err = kernel_bind(sock, (struct sockaddr *)addr, sizeof(*addr));
	if (!err)
		kernel_getsockname(sock, (struct sockaddr *)addr);
	return err;
}

struct tcp_load {
	struct socket *listener;
	unsigned int connections;
};

/* Takes connections one after the other, and sends back what comes. */
static noinline int load_tcp_server(void *data)
{
	struct tcp_load *load = data;
	u8 *block = kmalloc(LOAD_BLOCK, GFP_KERNEL);
	struct socket *sock;
	unsigned int i;
	int n;

	for (i = 0; block && i < load->connections; i++) {
		if (kernel_accept(load->listener, &sock, 0))
			break;
		while ((n = sock_receive(sock, block, LOAD_BLOCK, NULL)) > 0)
			sock_send(sock, block, (size_t)n, NULL);
		sock_release(sock);
	}
	kfree(block);
	while (!kthread_should_stop()) {
		schedule_timeout_interruptible(1);
		try_to_freeze();
	}
	return 0;
}

static noinline int receive_block(struct socket *sock, u8 *block)
{
	int n, got = 0;

	while (got < LOAD_BLOCK) {
		n = sock_receive(sock, block + got, (size_t)(LOAD_BLOCK - got), NULL);
		if (n <= 0)
			return n ? n : -EPIPE;
		got += n;
	}
	return 0;
}

/* One connection: a block to and fro for each number up to 4. */
static noinline int load_tcp_client(struct sockaddr_in *addr, unsigned int number, u8 *block, u32 *sum)
{
	struct socket *sock;
	unsigned int i;
	int err = sock_create_kern(AF_INET, SOCK_STREAM, 0, &sock);

	if (err)
		return err;
	err = kernel_connect(sock, (struct sockaddr *)addr, sizeof(*addr), 0);
	for (i = 0; !err && i <= number % 4; i++) {
		load_fill(block, number + i);
		err = sock_send(sock, block, LOAD_BLOCK, NULL) == LOAD_BLOCK ? 0 : -EIO;
		if (!err)
			err = receive_block(sock, block);
		*sum = load_sum(*sum, block);
	}
	sock_release(sock);
	return err;
}

/* n connections to a thread that sends everything back. */
noinline int load_tcp(unsigned int n)
{
	struct tcp_load load = { .connections = n };
	u8 *block = kmalloc(LOAD_BLOCK, GFP_KERNEL);
	struct task_struct *server;
	struct sockaddr_in addr;
	unsigned int i;
	u32 sum = 0;
	int err = block ? sock_create_kern(AF_INET, SOCK_STREAM, 0, &load.listener) : -ENOMEM;

	if (err)
		goto out_block;
	err = load_bind(load.listener, &addr);
	if (!err)
		err = kernel_listen(load.listener, 8);
	if (err)
		goto out;
	server = kthread_run(load_tcp_server, &load, "load_tcp");
	err = PTR_ERR_OR_ZERO(server);
	if (err)
		goto out;
	for (i = 0; !err && i < n; i++)
		err = load_tcp_client(&addr, i, block, &sum);
	if (err)
		kernel_sock_shutdown(load.listener, SHUT_RDWR);
	kthread_stop(server);
out:
	sock_release(load.listener);
out_block:
	kfree(block);
	return err ? err : load_result(sum);
}

/* n datagrams from one socket to another one. */
noinline int load_udp(unsigned int n)
{
	struct socket *to = NULL, *from = NULL;
	u8 *block = kmalloc(2 * LOAD_BLOCK, GFP_KERNEL);
	struct sockaddr_in addr, sender;
	unsigned int i;
	u32 sum = 0;
	int err = block ? sock_create_kern(AF_INET, SOCK_DGRAM, 0, &to) : -ENOMEM;

	if (!err)
		err = sock_create_kern(AF_INET, SOCK_DGRAM, 0, &from);
	if (!err)
		err = load_bind(to, &addr);
	for (i = 0; !err && i < n; i++) {
		load_fill(block, i);
		err = sock_send(from, block, LOAD_BLOCK, &addr);
		if (err == LOAD_BLOCK)
			err = sock_receive(to, block + LOAD_BLOCK, LOAD_BLOCK, &sender);
		err = err == LOAD_BLOCK && sender.sin_port ? 0 : -EIO;
		sum = load_sum(sum, block + LOAD_BLOCK);
	}
	if (from)
		sock_release(from);
	if (to)
		sock_release(to);
	kfree(block);
	return err ? err : load_result(sum);
}

/* n echo requests and their answers. */
noinline int load_ping(unsigned int n)
{
	struct sockaddr_in addr = { .sin_family = AF_INET, .sin_addr = htonl(INADDR_LOOPBACK) };
	u8 packet[sizeof(struct icmphdr) + 56];
	struct icmphdr *icmph = (struct icmphdr *)packet;
	struct socket *sock;
	unsigned int i;
	u32 sum = 0;
	int err = sock_create_kern(AF_INET, SOCK_DGRAM, IPPROTO_ICMP, &sock);

	if (err)
		return err;
	for (i = 0; !err && i < n; i++) {
		memset(packet, (int)i, sizeof(packet));
		*icmph = (struct icmphdr){ .type = ICMP_ECHO, .sequence = htons(i) };
		err = sock_send(sock, packet, sizeof(packet), &addr);
		if (err == sizeof(packet))
			err = sock_receive(sock, packet, sizeof(packet), NULL);
		err = err == sizeof(packet) && icmph->type == ICMP_ECHOREPLY ? 0 : -EIO;
		sum = crc32_le(sum, packet + sizeof(*icmph), 56) + ntohs(icmph->sequence);
	}
	sock_release(sock);
	return err ? err : load_result(sum);
}
