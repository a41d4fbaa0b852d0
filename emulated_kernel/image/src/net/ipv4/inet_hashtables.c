// SPDX-License-Identifier: GPL-2.0-or-later
// Sockets by their addresses: connections, listeners and datagram sockets, and the ports that are taken.
#include "errno.h"
#include "hash.h"
#include "inet.h"

#define EHASH_BITS 6
#define PORT_FIRST 32768
#define PORT_LAST 60999

static DECLARE_HASHTABLE(ehash, EHASH_BITS);
static DECLARE_HASHTABLE(lhash, EHASH_BITS); /* without a peer, by port */
static DECLARE_HASHTABLE(bhash, EHASH_BITS);
static DEFINE_SPINLOCK(hashinfo_lock);
static u16 next_port = PORT_FIRST;

static u32 inet_ehashfn(__be32 saddr, __be16 sport, __be32 daddr, u16 hnum)
{
	return jhash_3words(saddr, daddr, (u32)sport << 16 | hnum, 0);
}

struct sock *__inet_lookup_established(__be32 saddr, __be16 sport, __be32 daddr, u16 hnum)
{
	u32 hash = inet_ehashfn(saddr, sport, daddr, hnum);
	struct sock *sk, *found = NULL;

	spin_lock_bh(&hashinfo_lock);
	hash_for_each_possible(ehash, sk, sk_node, hash) {
		if (sk->sk_daddr == saddr && sk->sk_dport == sport && sk->sk_rcv_saddr == daddr &&
		    sk->sk_num == hnum) {
			sock_hold(sk);
			found = sk;
			break;
		}
	}
	spin_unlock_bh(&hashinfo_lock);
	return found;
}

/* The one that is bound to the very address comes before one that is bound to any. */
static noinline struct sock *lookup_port(u8 protocol, __be32 daddr, u16 hnum)
{
	struct sock *sk, *found = NULL;

	spin_lock_bh(&hashinfo_lock);
	hash_for_each_possible(lhash, sk, sk_node, hnum) {
		if (sk->sk_protocol != protocol || sk->sk_num != hnum)
			continue;
		if (sk->sk_rcv_saddr == daddr || (!found && sk->sk_rcv_saddr == INADDR_ANY))
			found = sk;
	}
	if (found)
		sock_hold(found);
	spin_unlock_bh(&hashinfo_lock);
	return found;
}

struct sock *__inet_lookup_listener(__be32 daddr, u16 hnum)
{
	return lookup_port(IPPROTO_TCP, daddr, hnum);
}

struct sock *__udp4_lib_lookup(__be32 daddr, u16 hnum)
{
	return lookup_port(IPPROTO_UDP, daddr, hnum);
}

struct sock *ping_lookup(u16 ident)
{
	return lookup_port(IPPROTO_ICMP, INADDR_ANY, ident);
}

/* The table holds no reference: a socket leaves it before its last one goes. */
void inet_hash(struct sock *sk)
{
	bool connection = sk->sk_protocol == IPPROTO_TCP && sk->sk_state != TCP_LISTEN;
	u32 hash = inet_ehashfn(sk->sk_daddr, sk->sk_dport, sk->sk_rcv_saddr, sk->sk_num);

	spin_lock_bh(&hashinfo_lock);
	if (connection)
		hash_add(ehash, &sk->sk_node, hash);
	else
		hash_add(lhash, &sk->sk_node, sk->sk_num);
	spin_unlock_bh(&hashinfo_lock);
}

void inet_unhash(struct sock *sk)
{
	spin_lock_bh(&hashinfo_lock);
	hash_del(&sk->sk_node);
	spin_unlock_bh(&hashinfo_lock);
}

static bool port_is_taken(const struct sock *sk, u16 port)
{
	struct sock *other;

	hash_for_each_possible(bhash, other, sk_bind_node, port) {
		if (other->sk_num == port && other->sk_protocol == sk->sk_protocol && !other->sk_daddr &&
		    (!other->sk_rcv_saddr || !sk->sk_rcv_saddr || other->sk_rcv_saddr == sk->sk_rcv_saddr))
			return true;
	}
	return false;
}

static bool port_is_used(const struct sock *sk, u16 port)
{
	struct sock *other;

	hash_for_each_possible(bhash, other, sk_bind_node, port)
		if (other->sk_num == port && other->sk_protocol == sk->sk_protocol)
			return true;
	return false;
}

static noinline u16 free_port(const struct sock *sk)
{
	int tries;

	for (tries = PORT_LAST - PORT_FIRST; tries >= 0; tries--) {
		next_port = next_port == PORT_LAST ? PORT_FIRST : next_port + 1;
		if (!port_is_used(sk, next_port))
			return next_port;
	}
	return 0;
}

static int take_port(struct sock *sk, u16 port)
{
	sk->sk_num = port;
	sk->sk_sport = htons(port);
	hash_add(bhash, &sk->sk_bind_node, port);
	return 0;
}

/* 0: any that is free. */
int inet_csk_get_port(struct sock *sk, unsigned short snum)
{
	int ret = -EADDRINUSE;
	u16 port;

	spin_lock_bh(&hashinfo_lock);
	port = snum ? snum : free_port(sk);
	if (port && !(snum && port_is_taken(sk, port)))
		ret = take_port(sk, port);
	spin_unlock_bh(&hashinfo_lock);
	return ret;
}

/* A connection has the port of its listener. */
int inet_share_port(struct sock *sk, struct sock *with)
{
	spin_lock_bh(&hashinfo_lock);
	take_port(sk, with->sk_num);
	spin_unlock_bh(&hashinfo_lock);
	return 0;
}

void inet_put_port(struct sock *sk)
{
	spin_lock_bh(&hashinfo_lock);
	hash_del(&sk->sk_bind_node);
	sk->sk_num = 0;
	spin_unlock_bh(&hashinfo_lock);
}
