/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Trace events: trace_NAME() is a nop until the host makes it a jump to code that fills a record.
 *
 * The events are listed in include/trace/. A list is included several times, each time with other
 * meanings of TRACE_EVENT and of the words inside it (see kernel/trace/trace_events.c).
 */
#ifndef _TRACEPOINT_H
#define _TRACEPOINT_H

#include "dropreason.h"
#include "hrtimer.h"
#include "jump_label.h"

struct inode;
struct kmem_cache;
struct net_device;
struct page;
struct pt_regs;
struct sk_buff;
struct sock;
struct task_struct;
struct timer_list;
struct work_struct;

/* What every record begins with; the host fills it in. */
struct trace_entry {
	unsigned short type;
	unsigned char flags;
	unsigned char preempt_count;
	int pid;
};

/* A field behind the struct trace_entry; its offset follows from the sizes and alignments before it. */
struct trace_event_fields {
	const char *type;
	const char *name;
	unsigned long size, align, is_signed, len;
};

struct trace_event_call {
	const char *system;
	const char *name;
	const char *print_fmt;
	const struct trace_event_fields *fields;
	unsigned long nr_fields;
	struct static_key *key;
};

/* The host takes a record. */
void host_trace_commit(const struct trace_event_call *call, void *entry, size_t size);

#define PARAMS(...) __VA_ARGS__
#define PROTO(...) __VA_ARGS__
#define ARGS(...) __VA_ARGS__
#define FIELDS(...) __VA_ARGS__
#define ASSIGN(...) __VA_ARGS__
#define PRINT(fmt, ...) "\"" fmt "\", " __stringify(__VA_ARGS__)

#define __stringify_1(...) #__VA_ARGS__
#define __stringify(...) __stringify_1(__VA_ARGS__)
#define _RET_IP_ ((unsigned long)__builtin_return_address(0))

#define TRACE_EVENT(name, proto, args, fields, assign, print)                                  \
	EVENT_CLASS(name, PARAMS(proto), PARAMS(args), PARAMS(fields), PARAMS(assign), print)    \
	DEFINE_EVENT(name, name, PARAMS(proto), PARAMS(args))

/* Here: the functions that the kernel calls. */
#define EVENT_CLASS(class, proto, args, fields, assign, print)
#define DEFINE_EVENT(class, name, proto, args)                                                 \
	extern struct static_key __tracepoint_##name;                                          \
	void __traceiter_##name(proto);                                                        \
	static __always_inline void trace_##name(proto)                                        \
	{                                                                                      \
		if (static_branch_unlikely(&__tracepoint_##name))                              \
			__traceiter_##name(args);                                              \
	}
#include "trace/task.h"
#include "trace/sched.h"
#include "trace/workqueue.h"
#include "trace/filemap.h"
#include "trace/kmem.h"
#include "trace/timer.h"
#include "trace/signal.h"
#include "trace/irq.h"
#include "trace/skb.h"
#include "trace/net.h"
#include "trace/sock.h"
#ifndef __riscv
#include "trace/exceptions.h"
#include "trace/irq_vectors.h"
#endif
#include "trace/raw_syscalls.h"
#undef EVENT_CLASS
#undef DEFINE_EVENT

#endif
