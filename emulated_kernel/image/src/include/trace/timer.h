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

TRACE_EVENT(hrtimer_init,
	PROTO(struct hrtimer *hrtimer, clockid_t clockid, enum hrtimer_mode mode),
	ARGS(hrtimer, clockid, mode),
	FIELDS(
		__field(void *, hrtimer)
		__field(clockid_t, clockid)
		__field(enum hrtimer_mode, mode)),
	ASSIGN(
		__entry->hrtimer = hrtimer;
		__entry->clockid = clockid;
		__entry->mode = mode;),
	PRINT("hrtimer=%p clockid=%s mode=%s", __entry->hrtimer,
	      __print_symbolic(__entry->clockid,
			       { CLOCK_REALTIME, "CLOCK_REALTIME" },
			       { CLOCK_MONOTONIC, "CLOCK_MONOTONIC" },
			       { CLOCK_BOOTTIME, "CLOCK_BOOTTIME" },
			       { CLOCK_TAI, "CLOCK_TAI" }),
	      decode_hrtimer_mode(__entry->mode)))

TRACE_EVENT(hrtimer_start,
	PROTO(struct hrtimer *hrtimer, enum hrtimer_mode mode, bool was_armed),
	ARGS(hrtimer, mode, was_armed),
	FIELDS(
		__field(void *, hrtimer)
		__field(void *, function)
		__field(s64, expires)
		__field(s64, softexpires)
		__field(enum hrtimer_mode, mode)
		__field(bool, was_armed)),
	ASSIGN(
		__entry->hrtimer = hrtimer;
		__entry->function = hrtimer->function;
		__entry->expires = hrtimer->expires;
		__entry->softexpires = hrtimer->_softexpires;
		__entry->mode = mode;
		__entry->was_armed = was_armed;),
	PRINT("hrtimer=%p function=%ps expires=%llu softexpires=%llu mode=%s was_armed=%d",
	      __entry->hrtimer, __entry->function, (unsigned long long) __entry->expires,
	      (unsigned long long) __entry->softexpires, decode_hrtimer_mode(__entry->mode),
	      __entry->was_armed))

TRACE_EVENT(hrtimer_expire_entry,
	PROTO(struct hrtimer *hrtimer, ktime_t now),
	ARGS(hrtimer, now),
	FIELDS(
		__field(void *, hrtimer)
		__field(s64, now)
		__field(void *, function)),
	ASSIGN(
		__entry->hrtimer = hrtimer;
		__entry->now = now;
		__entry->function = hrtimer->function;),
	PRINT("hrtimer=%p function=%ps now=%llu",
	      __entry->hrtimer, __entry->function, (unsigned long long) __entry->now))

EVENT_CLASS(hrtimer_class,
	PROTO(struct hrtimer *hrtimer),
	ARGS(hrtimer),
	FIELDS(__field(void *, hrtimer)),
	ASSIGN(__entry->hrtimer = hrtimer;),
	PRINT("hrtimer=%p", __entry->hrtimer))

DEFINE_EVENT(hrtimer_class, hrtimer_expire_exit, PROTO(struct hrtimer *hrtimer), ARGS(hrtimer))
DEFINE_EVENT(hrtimer_class, hrtimer_cancel, PROTO(struct hrtimer *hrtimer), ARGS(hrtimer))

DEFINE_EVENT(timer_class, timer_expire_exit, PROTO(struct timer_list *timer), ARGS(timer))
DEFINE_EVENT(timer_class, timer_cancel, PROTO(struct timer_list *timer), ARGS(timer))
