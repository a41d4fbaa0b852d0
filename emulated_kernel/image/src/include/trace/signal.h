/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The events of signals; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM signal

TRACE_EVENT(signal_generate,
	PROTO(int sig, int code, struct task_struct *task, int group, int result),
	ARGS(sig, code, task, group, result),
	FIELDS(
		__field(int, sig)
		__field(int, errno)
		__field(int, code)
		__array(char, comm, TASK_COMM_LEN)
		__field(pid_t, pid)
		__field(int, group)
		__field(int, result)),
	ASSIGN(
		__entry->sig = sig;
		__entry->errno = 0;
		__entry->code = code;
		trace_copy_comm(__entry->comm, task);
		__entry->pid = task->pid;
		__entry->group = group;
		__entry->result = result;),
	PRINT("sig=%d errno=%d code=%d comm=%s pid=%d grp=%d res=%d",
	      __entry->sig, __entry->errno, __entry->code, __entry->comm, __entry->pid,
	      __entry->group, __entry->result))
