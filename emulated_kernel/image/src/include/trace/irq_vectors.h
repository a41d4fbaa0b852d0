/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The events of the interrupts of x86 that no device sends; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM irq_vectors

EVENT_CLASS(x86_irq_vector,
	PROTO(int vector),
	ARGS(vector),
	FIELDS(__field(int, vector)),
	ASSIGN(__entry->vector = vector;),
	PRINT("vector=%d", __entry->vector))

DEFINE_EVENT(x86_irq_vector, local_timer_entry, PROTO(int vector), ARGS(vector))
DEFINE_EVENT(x86_irq_vector, local_timer_exit, PROTO(int vector), ARGS(vector))
DEFINE_EVENT(x86_irq_vector, reschedule_entry, PROTO(int vector), ARGS(vector))
DEFINE_EVENT(x86_irq_vector, reschedule_exit, PROTO(int vector), ARGS(vector))
DEFINE_EVENT(x86_irq_vector, call_function_entry, PROTO(int vector), ARGS(vector))
DEFINE_EVENT(x86_irq_vector, call_function_exit, PROTO(int vector), ARGS(vector))
