/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The events of the scheduler; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM sched

TRACE_EVENT(sched_kthread_stop,
	PROTO(struct task_struct *t),
	ARGS(t),
	FIELDS(
		__array(char, comm, TASK_COMM_LEN)
		__field(pid_t, pid)),
	ASSIGN(
		trace_copy_comm(__entry->comm, t);
		__entry->pid = t->pid;),
	PRINT("comm=%s pid=%d", __entry->comm, __entry->pid))

TRACE_EVENT(sched_kthread_stop_ret,
	PROTO(int ret),
	ARGS(ret),
	FIELDS(__field(int, ret)),
	ASSIGN(__entry->ret = ret;),
	PRINT("ret=%d", __entry->ret))

EVENT_CLASS(sched_wakeup_template,
	PROTO(struct task_struct *p),
	ARGS(p),
	FIELDS(
		__array(char, comm, TASK_COMM_LEN)
		__field(pid_t, pid)
		__field(int, prio)
		__field(int, target_cpu)),
	ASSIGN(
		trace_copy_comm(__entry->comm, p);
		__entry->pid = p->pid;
		__entry->prio = p->prio;
		__entry->target_cpu = task_cpu(p);),
	PRINT("comm=%s pid=%d prio=%d target_cpu=%03d",
	      __entry->comm, __entry->pid, __entry->prio, __entry->target_cpu))

DEFINE_EVENT(sched_wakeup_template, sched_waking, PROTO(struct task_struct *p), ARGS(p))
DEFINE_EVENT(sched_wakeup_template, sched_wakeup, PROTO(struct task_struct *p), ARGS(p))
DEFINE_EVENT(sched_wakeup_template, sched_wakeup_new, PROTO(struct task_struct *p), ARGS(p))

TRACE_EVENT(sched_migrate_task,
	PROTO(struct task_struct *p, int dest_cpu),
	ARGS(p, dest_cpu),
	FIELDS(
		__array(char, comm, TASK_COMM_LEN)
		__field(pid_t, pid)
		__field(int, prio)
		__field(int, orig_cpu)
		__field(int, dest_cpu)),
	ASSIGN(
		trace_copy_comm(__entry->comm, p);
		__entry->pid = p->pid;
		__entry->prio = p->prio;
		__entry->orig_cpu = task_cpu(p);
		__entry->dest_cpu = dest_cpu;),
	PRINT("comm=%s pid=%d prio=%d orig_cpu=%d dest_cpu=%d",
	      __entry->comm, __entry->pid, __entry->prio, __entry->orig_cpu, __entry->dest_cpu))

TRACE_EVENT(sched_switch,
	PROTO(bool preempt, struct task_struct *prev, struct task_struct *next, u32 prev_state),
	ARGS(preempt, prev, next, prev_state),
	FIELDS(
		__array(char, prev_comm, TASK_COMM_LEN)
		__field(pid_t, prev_pid)
		__field(int, prev_prio)
		__field(long, prev_state)
		__array(char, next_comm, TASK_COMM_LEN)
		__field(pid_t, next_pid)
		__field(int, next_prio)),
	ASSIGN(
		trace_copy_comm(__entry->prev_comm, prev);
		__entry->prev_pid = prev->pid;
		__entry->prev_prio = prev->prio;
		__entry->prev_state = task_report_state(preempt, prev_state, prev->exit_state);
		trace_copy_comm(__entry->next_comm, next);
		__entry->next_pid = next->pid;
		__entry->next_prio = next->prio;),
	PRINT("prev_comm=%s prev_pid=%d prev_prio=%d prev_state=%s%s ==> next_comm=%s next_pid=%d next_prio=%d",
	      __entry->prev_comm, __entry->prev_pid, __entry->prev_prio,
	      (__entry->prev_state & (TASK_REPORT_MAX - 1)) ?
	      __print_flags(__entry->prev_state & (TASK_REPORT_MAX - 1), "|",
			    { TASK_INTERRUPTIBLE, "S" },
			    { TASK_UNINTERRUPTIBLE, "D" },
			    { __TASK_STOPPED, "T" },
			    { __TASK_TRACED, "t" },
			    { EXIT_DEAD, "X" },
			    { EXIT_ZOMBIE, "Z" },
			    { TASK_PARKED, "P" },
			    { TASK_DEAD, "I" }) : "R",
	      __entry->prev_state & TASK_REPORT_MAX ? "+" : "",
	      __entry->next_comm, __entry->next_pid, __entry->next_prio))

EVENT_CLASS(sched_process_template,
	PROTO(struct task_struct *p),
	ARGS(p),
	FIELDS(
		__array(char, comm, TASK_COMM_LEN)
		__field(pid_t, pid)
		__field(int, prio)),
	ASSIGN(
		trace_copy_comm(__entry->comm, p);
		__entry->pid = p->pid;
		__entry->prio = p->prio;),
	PRINT("comm=%s pid=%d prio=%d", __entry->comm, __entry->pid, __entry->prio))

DEFINE_EVENT(sched_process_template, sched_process_free, PROTO(struct task_struct *p), ARGS(p))
DEFINE_EVENT(sched_process_template, sched_process_exit, PROTO(struct task_struct *p), ARGS(p))

TRACE_EVENT(sched_process_wait,
	PROTO(pid_t upid),
	ARGS(upid),
	FIELDS(
		__array(char, comm, TASK_COMM_LEN)
		__field(pid_t, pid)
		__field(int, prio)),
	ASSIGN(
		trace_copy_comm(__entry->comm, current);
		__entry->pid = upid > 0 ? upid : 0;
		__entry->prio = current->prio;),
	PRINT("comm=%s pid=%d prio=%d", __entry->comm, __entry->pid, __entry->prio))

TRACE_EVENT(sched_process_fork,
	PROTO(struct task_struct *parent, struct task_struct *child),
	ARGS(parent, child),
	FIELDS(
		__array(char, parent_comm, TASK_COMM_LEN)
		__field(pid_t, parent_pid)
		__array(char, child_comm, TASK_COMM_LEN)
		__field(pid_t, child_pid)),
	ASSIGN(
		trace_copy_comm(__entry->parent_comm, parent);
		__entry->parent_pid = parent->pid;
		trace_copy_comm(__entry->child_comm, child);
		__entry->child_pid = child->pid;),
	PRINT("comm=%s pid=%d child_comm=%s child_pid=%d",
	      __entry->parent_comm, __entry->parent_pid, __entry->child_comm, __entry->child_pid))

TRACE_EVENT(sched_process_exec,
	PROTO(struct task_struct *p, pid_t old_pid, const char *filename),
	ARGS(p, old_pid, filename),
	FIELDS(
		__string(filename)
		__field(pid_t, pid)
		__field(pid_t, old_pid)),
	ASSIGN(
		__assign_str(filename, filename);
		__entry->pid = p->pid;
		__entry->old_pid = old_pid;),
	PRINT("filename=%s pid=%d old_pid=%d", __get_str(filename), __entry->pid, __entry->old_pid))

EVENT_CLASS(sched_stat_template,
	PROTO(struct task_struct *tsk, u64 delay),
	ARGS(tsk, delay),
	FIELDS(
		__array(char, comm, TASK_COMM_LEN)
		__field(pid_t, pid)
		__field(u64, delay)),
	ASSIGN(
		trace_copy_comm(__entry->comm, tsk);
		__entry->pid = tsk->pid;
		__entry->delay = delay;),
	PRINT("comm=%s pid=%d delay=%Lu [ns]", __entry->comm, __entry->pid,
	      (unsigned long long)__entry->delay))

DEFINE_EVENT(sched_stat_template, sched_stat_wait, PROTO(struct task_struct *tsk, u64 delay), ARGS(tsk, delay))
DEFINE_EVENT(sched_stat_template, sched_stat_sleep, PROTO(struct task_struct *tsk, u64 delay), ARGS(tsk, delay))
DEFINE_EVENT(sched_stat_template, sched_stat_blocked, PROTO(struct task_struct *tsk, u64 delay), ARGS(tsk, delay))
