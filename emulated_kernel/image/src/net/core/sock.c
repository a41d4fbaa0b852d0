// SPDX-License-Identifier: GPL-2.0-or-later
// What the sockets of all protocols have: locks, queues, memory, waiting.
#include "sock.h"
#include "bug.h"
#include "errno.h"
#include "mm.h"
#include "printk.h"
#include "sched.h"
#include "tracepoint.h"

int proto_register(struct proto *prot)
{
	prot->slab = kmem_cache_create(prot->name, prot->obj_size, 64, 0, NULL);
	return prot->slab ? 0 : -ENOMEM;
}

struct sock *sk_alloc(struct proto *prot, gfp_t priority)
{
	struct sock *sk = kmem_cache_zalloc(prot->slab, priority);

	if (sk)
		sk->sk_prot = prot;
	return sk;
}

void sock_init_data(struct socket *sock, struct sock *sk)
{
	skb_queue_head_init(&sk->sk_receive_queue);
	skb_queue_head_init(&sk->sk_write_queue);
	skb_queue_head_init(&sk->sk_backlog);
	spin_lock_init(&sk->sk_lock.slock);
	init_waitqueue_head(&sk->sk_lock.wq);
	init_waitqueue_head(&sk->sk_wait);
	INIT_LIST_HEAD(&sk->sk_accept_queue);
	INIT_LIST_HEAD(&sk->sk_accept_node);
	atomic_set(&sk->sk_refcnt, 1);
	sk->sk_state = TCP_CLOSE;
	sk->sk_sndbuf = sk->sk_rcvbuf = SK_BUF_DEFAULT;
	sk->sk_socket = sock;
	if (sock)
		sock->sk = sk;
}

static noinline void __sk_destruct(struct sock *sk)
{
	skb_queue_purge(&sk->sk_receive_queue);
	skb_queue_purge(&sk->sk_write_queue);
	skb_queue_purge(&sk->sk_backlog);
	WARN_ON_ONCE(atomic_read(&sk->sk_rmem_alloc) != 0);
	kmem_cache_free(sk->sk_prot->slab, sk);
}

void sk_free(struct sock *sk)
{
	__sk_destruct(sk);
}

/* Called with the spinlock, and comes back with it. Queued before it is let go: release_sock() looks who waits. */
static noinline void __lock_sock(struct sock *sk)
{
	wait_queue_entry_t wait;

	init_wait_entry(&wait, 0);
	while (sock_owned_by_user(sk)) {
		prepare_to_wait_exclusive(&sk->sk_lock.wq, &wait, TASK_UNINTERRUPTIBLE);
		spin_unlock_bh(&sk->sk_lock.slock);
		schedule();
		spin_lock_bh(&sk->sk_lock.slock);
	}
	finish_wait(&sk->sk_lock.wq, &wait);
}

void lock_sock_nested(struct sock *sk, int subclass __attribute__((unused)))
{
	spin_lock_bh(&sk->sk_lock.slock);
	if (sock_owned_by_user(sk))
		__lock_sock(sk);
	sk->sk_lock.owned = 1;
	spin_unlock_bh(&sk->sk_lock.slock);
}

/* The packets that came meanwhile; more may come while these are seen to. */
static noinline void __release_sock(struct sock *sk)
{
	struct sk_buff *skb;

	while ((skb = __skb_dequeue(&sk->sk_backlog))) {
		spin_unlock_bh(&sk->sk_lock.slock);
		sk->sk_prot->backlog_rcv(sk, skb);
		cond_resched();
		spin_lock_bh(&sk->sk_lock.slock);
	}
}

void release_sock(struct sock *sk)
{
	spin_lock_bh(&sk->sk_lock.slock);
	__release_sock(sk);
	sk->sk_lock.owned = 0;
	if (!list_empty(&sk->sk_lock.wq.head))
		wake_up(&sk->sk_lock.wq);
	spin_unlock_bh(&sk->sk_lock.slock);
}

noinline void sk_add_backlog(struct sock *sk, struct sk_buff *skb)
{
	__skb_queue_tail(&sk->sk_backlog, skb);
}

static void sock_rfree(struct sk_buff *skb)
{
	__atomic_fetch_sub(&skb->sk->sk_rmem_alloc.counter, (int)skb->truesize, __ATOMIC_SEQ_CST);
}

/* A received packet counts against its reader's memory until it is read. */
void skb_set_owner_r(struct sk_buff *skb, struct sock *sk)
{
	skb_orphan(skb);
	skb->sk = sk;
	skb->destructor = sock_rfree;
	__atomic_fetch_add(&sk->sk_rmem_alloc.counter, (int)skb->truesize, __ATOMIC_SEQ_CST);
}

void sock_def_wakeup(struct sock *sk)
{
	wake_up_interruptible_all(&sk->sk_wait);
}

void sock_def_readable(struct sock *sk)
{
	wake_up_interruptible(&sk->sk_wait);
}

int sock_queue_rcv_skb(struct sock *sk, struct sk_buff *skb)
{
	if (atomic_read(&sk->sk_rmem_alloc) + (int)skb->truesize > sk->sk_rcvbuf) {
		trace_sock_rcvqueue_full(sk, skb);
		return -ENOMEM;
	}
	skb_set_owner_r(skb, sk);
	skb_queue_tail(&sk->sk_receive_queue, skb);
	sock_def_readable(sk);
	return 0;
}

int sock_error(struct sock *sk)
{
	return sk->sk_err ? -__atomic_exchange_n(&sk->sk_err, 0, __ATOMIC_SEQ_CST) : 0;
}

/* sk_err is set. */
noinline void sk_error_report(struct sock *sk)
{
	sock_def_wakeup(sk);
	trace_inet_sk_error_report(sk);
}

/* A number that no other socket ever has; within the code of events. */
notrace u64 sock_gen_cookie(struct sock *sk)
{
	static atomic_t last;
	u32 none = 0, next;

	if (!READ_ONCE(sk->sk_cookie)) {
		next = (u32)__atomic_add_fetch(&last.counter, 1, __ATOMIC_RELAXED);
		__atomic_compare_exchange_n(&sk->sk_cookie, &none, next, false, __ATOMIC_RELAXED,
					    __ATOMIC_RELAXED);
	}
	return sk->sk_cookie;
}

static bool datagram_or_end(struct sock *sk)
{
	return skb_peek(&sk->sk_receive_queue) || sk->sk_err || sk->sk_shutdown & RCV_SHUTDOWN;
}

struct sk_buff *skb_recv_datagram(struct sock *sk, unsigned int flags, int *err)
{
	struct sk_buff *skb;

	for (;;) {
		*err = sock_error(sk);
		if (*err)
			return NULL;
		skb = skb_dequeue(&sk->sk_receive_queue);
		if (skb || sk->sk_shutdown & RCV_SHUTDOWN)
			return skb;
		*err = -EAGAIN;
		if (flags & MSG_DONTWAIT)
			return NULL;
		wait_event_interruptible(&sk->sk_wait, datagram_or_end(sk));
	}
}

static bool stream_readable(struct sock *sk)
{
	return datagram_or_end(sk) || sk->sk_state == TCP_CLOSE;
}

/* Called with the socket locked; it isn't while this waits. */
int sk_wait_data(struct sock *sk)
{
	release_sock(sk);
	wait_event_interruptible(&sk->sk_wait, stream_readable(sk));
	lock_sock(sk);
	return 0;
}
