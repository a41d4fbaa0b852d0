/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The events of tasks that come, and of their names; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM task

TRACE_EVENT(task_newtask,
	PROTO(struct task_struct *task, unsigned long clone_flags),
	ARGS(task, clone_flags),
	FIELDS(
		__field(pid_t, pid)
		__array(char, comm, TASK_COMM_LEN)
		__field(unsigned long, clone_flags)
		__field(short, oom_score_adj)),
	ASSIGN(
		__entry->pid = task->pid;
		trace_copy_comm(__entry->comm, task);
		__entry->clone_flags = clone_flags;
		__entry->oom_score_adj = 0;),
	PRINT("pid=%d comm=%s clone_flags=%lx oom_score_adj=%hd", __entry->pid, __entry->comm,
	      __entry->clone_flags, __entry->oom_score_adj))

TRACE_EVENT(task_rename,
	PROTO(struct task_struct *task, const char *comm),
	ARGS(task, comm),
	FIELDS(
		__field(pid_t, pid)
		__array(char, oldcomm, TASK_COMM_LEN)
		__array(char, newcomm, TASK_COMM_LEN)
		__field(short, oom_score_adj)),
	ASSIGN(
		__entry->pid = task->pid;
		trace_copy_comm(__entry->oldcomm, task);
		trace_copy_name(__entry->newcomm, comm);
		__entry->oom_score_adj = 0;),
	PRINT("pid=%d oldcomm=%s newcomm=%s oom_score_adj=%hd", __entry->pid, __entry->oldcomm,
	      __entry->newcomm, __entry->oom_score_adj))
