/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The events of kernel timers; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM timer

EVENT_CLASS(timer_class,
	PROTO(struct timer_list *timer),
	ARGS(timer),
	FIELDS(__field(void *, timer)),
	ASSIGN(__entry->timer = timer;),
	PRINT("timer=%p", __entry->timer))

DEFINE_EVENT(timer_class, timer_init, PROTO(struct timer_list *timer), ARGS(timer))

TRACE_EVENT(timer_start,
	PROTO(struct timer_list *timer, unsigned long expires, unsigned int flags),
	ARGS(timer, expires, flags),
	FIELDS(
		__field(void *, timer)
		__field(void *, function)
		__field(unsigned long, expires)
		__field(unsigned long, now)
		__field(unsigned int, flags)),
	ASSIGN(
		__entry->timer = timer;
		__entry->function = timer->function;
		__entry->expires = expires;
		__entry->now = jiffies;
		__entry->flags = flags;),
	PRINT("timer=%p function=%ps expires=%lu [timeout=%ld] cpu=%u idx=%u flags=%s",
	      __entry->timer, __entry->function, __entry->expires,
	      (long)__entry->expires - __entry->now,
	      __entry->flags & TIMER_CPUMASK,
	      __entry->flags >> TIMER_ARRAYSHIFT,
	      decode_timer_flags(__entry->flags & TIMER_TRACE_FLAGMASK)))

TRACE_EVENT(timer_expire_entry,
	PROTO(struct timer_list *timer, unsigned long baseclk),
	ARGS(timer, baseclk),
	FIELDS(
		__field(void *, timer)
		__field(unsigned long, now)
		__field(void *, function)
		__field(unsigned long, baseclk)),
	ASSIGN(
		__entry->timer = timer;
		__entry->now = jiffies;
		__entry->function = timer->function;
		__entry->baseclk = baseclk;),
	PRINT("timer=%p function=%ps now=%lu baseclk=%lu",
	      __entry->timer, __entry->function, __entry->now, __entry->baseclk))

DEFINE_EVENT(timer_class, timer_expire_exit, PROTO(struct timer_list *timer), ARGS(timer))
DEFINE_EVENT(timer_class, timer_cancel, PROTO(struct timer_list *timer), ARGS(timer))
