/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The events of all system calls, out of which the host makes those of each; a list for tracepoint.h. */
#undef TRACE_SYSTEM
#define TRACE_SYSTEM raw_syscalls

TRACE_EVENT(sys_enter,
	PROTO(struct pt_regs *regs, long id),
	ARGS(regs, id),
	FIELDS(
		__field(long, id)
		__array(unsigned long, args, 6)),
	ASSIGN(
		__entry->id = id;
		syscall_get_arguments(regs, __entry->args);),
	PRINT("NR %ld (%lx, %lx, %lx, %lx, %lx, %lx)", __entry->id, __entry->args[0],
	      __entry->args[1], __entry->args[2], __entry->args[3], __entry->args[4],
	      __entry->args[5]))

TRACE_EVENT(sys_exit,
	PROTO(struct pt_regs *regs, long ret),
	ARGS(regs, ret),
	FIELDS(
		__field(long, id)
		__field(long, ret)),
	ASSIGN(
		__entry->id = syscall_get_nr(regs);
		__entry->ret = ret;),
	PRINT("NR %ld = %ld", __entry->id, __entry->ret))
