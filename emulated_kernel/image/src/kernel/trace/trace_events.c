// SPDX-License-Identifier: GPL-2.0-or-later
// Everything of the trace events that isn't at their tracepoints: records, fields, formats, the code
// that fills a record. None of it can be traced, as it runs within what is traced.
#include "fs.h"
#include "hrtimer.h"
#include "mm.h"
#include "netdevice.h"
#include "sched.h"
#include "sock.h"
#include "string.h"
#include "syscalls.h"
#include "timer.h"
#include "tracepoint.h"
#include "workqueue.h"
#include "trace_events.h"

#define STRINGS_MAX 256
/* What of a name fits; the record is zeroed before. */
static __always_inline void trace_copy_name(char *to, const char *from)
{
	unsigned int i;

	for (i = 0; i < TASK_COMM_LEN - 1 && from[i]; i++)
		to[i] = from[i];
}

#define trace_copy_comm(to, task) __builtin_memcpy(to, (task)->comm, TASK_COMM_LEN)

/* Puts a string behind the record; returns its __data_loc: size in the upper half, offset below it. */
static __always_inline u32 trace_add_string(char *data, unsigned int at, unsigned int *used,
					    const char *s)
{
	unsigned int start = *used;

	do {
		data[*used] = *used < STRINGS_MAX - 1 ? *s : 0;
	} while (data[(*used)++] && s++);
	return (*used - start) << 16 | (at + start);
}

/* A task's state as one bit of TASK_REPORT, or what stands above them for an idle kthread or preemption. */
static __always_inline long task_report_state(bool preempt, u32 state, u32 exit_state)
{
	u32 report = (state | exit_state) & TASK_REPORT;

	if (preempt)
		return TASK_REPORT_MAX;
	if (state == TASK_IDLE)
		report = TASK_REPORT_IDLE;
	return report ? 1L << (31 - __builtin_clz(report)) : 0;
}

/* The two ends of a socket in a record: ports, the family, addresses, and these as IPv6 has them. */
#define trace_socket_ends(entry, sk)                                                           \
	do {                                                                                   \
		(entry)->sport = ntohs((sk)->sk_sport);                                        \
		(entry)->dport = ntohs((sk)->sk_dport);                                        \
		(entry)->family = AF_INET;                                                     \
		trace_address((entry)->saddr, (entry)->saddr_v6, (sk)->sk_rcv_saddr);          \
		trace_address((entry)->daddr, (entry)->daddr_v6, (sk)->sk_daddr);              \
	} while (0)

static __always_inline void trace_address(__u8 *to, __u8 *to_v6, __be32 address)
{
	__builtin_memcpy(to, &address, sizeof(address));
	to_v6[10] = to_v6[11] = 0xff;
	__builtin_memcpy(to_v6 + 12, &address, sizeof(address));
}

/* The records. */
#define __field(type, name) type name;
#define __array(type, name, len) type name[len];
#define __string(name) u32 __data_loc_##name;
#define EVENT_CLASS(class, proto, args, fields, assign, print)                                 \
	struct trace_event_raw_##class {                                                       \
		struct trace_entry ent;                                                        \
		fields                                                                         \
		char __data[];                                                                 \
	};
#define DEFINE_EVENT(class, name, proto, args)
#include "trace_lists.h"

/* Their fields, and how they are printed. */
#define ALIGNMENT(t) __alignof__(struct { t member; })
#define is_signed_type(type) (((type)(-1)) < (type)1)
#define __field(type, name)                                                                    \
	{ #type, #name, sizeof(type), ALIGNMENT(type), is_signed_type(type), 0 },
#define __array(type, name, len)                                                               \
	{ #type "[" __stringify(len) "]", #name, sizeof(type[len]), ALIGNMENT(type),           \
	  is_signed_type(type), len },
#define __string(name) { "__data_loc char[]", #name, 4, 4, is_signed_type(char), 0 },
#define EVENT_CLASS(class, proto, args, fields, assign, print)                                 \
	static const struct trace_event_fields trace_event_fields_##class[] = { fields };      \
	static const char print_fmt_##class[] = print;
#define DEFINE_EVENT(class, name, proto, args)                                                 \
	struct static_key __tracepoint_##name;                                                 \
	static const struct trace_event_call event_##name = {                                  \
		__stringify(TRACE_SYSTEM), #name, print_fmt_##class, trace_event_fields_##class, \
		ARRAY_SIZE(trace_event_fields_##class), &__tracepoint_##name,                  \
	};
#define __entry REC
#include "trace_lists.h"
#undef __entry

/* The functions that fill them. */
#define __assign_str(name, src)                                                                \
	__entry->__data_loc_##name = trace_add_string(__entry->__data, __at, &__strings, src)
#define EVENT_CLASS(class, proto, args, fields, assign, print)                                 \
	static noinline notrace void                                                           \
	trace_event_raw_event_##class(const struct trace_event_call *__call, proto)            \
	{                                                                                      \
		union {                                                                        \
			struct trace_event_raw_##class entry;                                  \
			char room[sizeof(struct trace_event_raw_##class) + STRINGS_MAX];       \
		} __record;                                                                    \
		struct trace_event_raw_##class *__entry = &__record.entry;                     \
		unsigned int __strings = 0;                                                       \
		const unsigned int __at __attribute__((unused)) =                              \
			offsetof(struct trace_event_raw_##class, __data);                      \
                                                                                               \
		__builtin_memset(__entry, 0, sizeof(*__entry));                                        \
		assign                                                                         \
		host_trace_commit(__call, __entry, sizeof(*__entry) + __strings);                      \
	}
#define DEFINE_EVENT(class, name, proto, args)                                                 \
	notrace void __traceiter_##name(proto)                                                 \
	{                                                                                      \
		trace_event_raw_event_##class(&event_##name, args);                            \
	}
#define __field(type, name)
#define __array(type, name, len)
#define __string(name)
#include "trace_lists.h"

/* The table of all, ended by NULL. */
#define EVENT_CLASS(class, proto, args, fields, assign, print)
#define DEFINE_EVENT(class, name, proto, args) &event_##name,
#define __field(type, name)
#define __array(type, name, len)
#define __string(name)
const struct trace_event_call *const ftrace_events[] __used = {
#include "trace_lists.h"
	NULL,
};
