/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The events of work for later; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM workqueue

TRACE_EVENT(workqueue_queue_work,
	PROTO(int req_cpu, const char *name, struct work_struct *work),
	ARGS(req_cpu, name, work),
	FIELDS(
		__field(void *, work)
		__field(void *, function)
		__string(workqueue)
		__field(int, req_cpu)
		__field(int, cpu)),
	ASSIGN(
		__entry->work = work;
		__entry->function = work->func;
		__assign_str(workqueue, name);
		__entry->req_cpu = req_cpu;
		__entry->cpu = -1;),
	PRINT("work struct=%p function=%ps workqueue=%s req_cpu=%d cpu=%d", __entry->work,
	      __entry->function, __get_str(workqueue), __entry->req_cpu, __entry->cpu))

TRACE_EVENT(workqueue_activate_work,
	PROTO(struct work_struct *work),
	ARGS(work),
	FIELDS(__field(void *, work)),
	ASSIGN(__entry->work = work;),
	PRINT("work struct %p", __entry->work))

TRACE_EVENT(workqueue_execute_start,
	PROTO(struct work_struct *work),
	ARGS(work),
	FIELDS(
		__field(void *, work)
		__field(void *, function)),
	ASSIGN(
		__entry->work = work;
		__entry->function = work->func;),
	PRINT("work struct %p: function %ps", __entry->work, __entry->function))

TRACE_EVENT(workqueue_execute_end,
	PROTO(struct work_struct *work, void (*function)(struct work_struct *work)),
	ARGS(work, function),
	FIELDS(
		__field(void *, work)
		__field(void *, function)),
	ASSIGN(
		__entry->work = work;
		__entry->function = function;),
	PRINT("work struct %p: function %ps", __entry->work, __entry->function))
