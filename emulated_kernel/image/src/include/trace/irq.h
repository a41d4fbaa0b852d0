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
