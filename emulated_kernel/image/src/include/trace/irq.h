/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The events of device interrupts; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM irq

TRACE_EVENT(irq_handler_entry,
	PROTO(int irq, const char *name),
	ARGS(irq, name),
	FIELDS(
		__field(int, irq)
		__string(name)),
	ASSIGN(
		__entry->irq = irq;
		__assign_str(name, name);),
	PRINT("irq=%d name=%s", __entry->irq, __get_str(name)))

TRACE_EVENT(irq_handler_exit,
	PROTO(int irq, int ret),
	ARGS(irq, ret),
	FIELDS(
		__field(int, irq)
		__field(int, ret)),
	ASSIGN(
		__entry->irq = irq;
		__entry->ret = ret;),
	PRINT("irq=%d ret=%s", __entry->irq, __entry->ret ? "handled" : "unhandled"))

EVENT_CLASS(softirq,
	PROTO(unsigned int vec_nr),
	ARGS(vec_nr),
	FIELDS(__field(unsigned int, vec)),
	ASSIGN(__entry->vec = vec_nr;),
	PRINT("vec=%u [action=%s]", __entry->vec,
	      __print_symbolic(__entry->vec, { 0, "HI" }, { 1, "TIMER" }, { 2, "NET_TX" },
			       { 3, "NET_RX" }, { 4, "BLOCK" }, { 5, "IRQ_POLL" }, { 6, "TASKLET" },
			       { 7, "SCHED" }, { 8, "HRTIMER" }, { 9, "RCU" })))

DEFINE_EVENT(softirq, softirq_entry, PROTO(unsigned int vec_nr), ARGS(vec_nr))
DEFINE_EVENT(softirq, softirq_exit, PROTO(unsigned int vec_nr), ARGS(vec_nr))
DEFINE_EVENT(softirq, softirq_raise, PROTO(unsigned int vec_nr), ARGS(vec_nr))
