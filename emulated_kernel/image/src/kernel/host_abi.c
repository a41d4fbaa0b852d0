// SPDX-License-Identifier: GPL-2.0-or-later
// The table by which the host learns of layouts, so that it knows none by heart.
#include "fs.h"
#include "host_abi.h"
#include "kallsyms.h"
#include "printk.h"
#include "sched.h"
#include "syscalls.h"
#include <asm/unistd.h>

DECLARE_PER_CPU(unsigned long, host_cr2);
DECLARE_PER_CPU(struct task_struct *, host_mailbox);
DECLARE_PER_CPU(char *, hardirq_stack_ptr);
extern char __log_buf[];
extern u64 log_first_seq, log_next_seq;
extern u32 log_first_idx, log_next_idx;
extern char host_user_hlt[], host_hypercall_hlt[], host_idle_hlt[];
void asm_host_interrupt(void);
void host_return(void);
void startup_64(void);

#define VALUE(name, value) { name, (u64)(value) }
#define OFFSET(type, member) { #type "." #member, offsetof(struct type, member) }
#define SIZE(type) { #type ".size", sizeof(struct type) }
#define PERCPU(symbol, name) { "percpu." name, (u64)(unsigned long)&symbol }
#define ADDRESS(symbol) { #symbol, (u64)(unsigned long)&symbol }

const struct host_abi_entry __guest_abi[] __used = {
	OFFSET(task_struct, stack),
	{ "task_struct.state", offsetof(struct task_struct, __state) },
	OFFSET(task_struct, flags),
	OFFSET(task_struct, on_rq),
	OFFSET(task_struct, exit_state),
	OFFSET(task_struct, exit_code),
	OFFSET(task_struct, pid),
	OFFSET(task_struct, tgid),
	OFFSET(task_struct, comm),
	OFFSET(task_struct, cred),
	OFFSET(task_struct, real_parent),
	OFFSET(task_struct, tasks),
	OFFSET(task_struct, host_file),
	OFFSET(task_struct, host_clone_pid),
	OFFSET(task_struct, umask),
	OFFSET(task_struct, start_time),
	OFFSET(task_struct, utime),
	OFFSET(task_struct, stime),
	{ "task_struct.sp", offsetof(struct task_struct, thread.sp) },
	SIZE(task_struct),
	{ "cred.uid", offsetof(struct cred, uid) },
	{ "cred.euid", offsetof(struct cred, euid) },
	{ "cred.fsuid", offsetof(struct cred, fsuid) },
	{ "cred.gid", offsetof(struct cred, gid) },
	{ "cred.egid", offsetof(struct cred, egid) },
	{ "cred.fsgid", offsetof(struct cred, fsgid) },
	VALUE("thread.size", THREAD_SIZE),
	VALUE("task.comm_len", TASK_COMM_LEN),
	VALUE("task.running", TASK_RUNNING),
	VALUE("task.interruptible", TASK_INTERRUPTIBLE),
	VALUE("task.uninterruptible", TASK_UNINTERRUPTIBLE),
	VALUE("task.dead", TASK_DEAD),
	VALUE("task.pf_kthread", PF_KTHREAD),
	VALUE("task.pf_exiting", PF_EXITING),
	VALUE("task.pf_host", PF_HOST),
	ADDRESS(init_task),
	{ "init_stack.top", (u64)(unsigned long)(init_stack + THREAD_SIZE) },

	{ "percpu.base", (u64)(unsigned long)__per_cpu_load },
	{ "percpu.size", (u64)(unsigned long)__per_cpu_size },
	PERCPU(current_task, "current_task"),
	PERCPU(__preempt_count, "preempt_count"),
	PERCPU(__need_resched, "need_resched"),
	PERCPU(host_mailbox, "host_mailbox"),
	PERCPU(host_cr2, "host_cr2"),
	PERCPU(hardirq_stack_ptr, "hardirq_stack_ptr"),
	PERCPU(cpu_number, "cpu_number"),
	VALUE("preempt.hardirq_mask", HARDIRQ_MASK),
	VALUE("preempt.softirq_mask", SOFTIRQ_MASK),

	SIZE(pt_regs),
	SIZE(boot_params),
	ADDRESS(host_clock),
	ADDRESS(host_exits),
	VALUE("host_exits.ring", offsetof(struct host_exits, ring)),
	VALUE("host_exits.entries", HOST_EXIT_RING),
	VALUE("host_exit_record.size", sizeof(struct host_exit_record)),

	ADDRESS(startup_64),
	ADDRESS(asm_host_interrupt),
	ADDRESS(host_return),
	ADDRESS(host_user_hlt),
	ADDRESS(host_hypercall_hlt),
	ADDRESS(host_idle_hlt),

	ADDRESS(__log_buf),
	VALUE("log_buf.size", LOG_BUF_SIZE),
	ADDRESS(log_first_seq),
	ADDRESS(log_next_seq),
	ADDRESS(log_first_idx),
	ADDRESS(log_next_idx),
	OFFSET(printk_record, seq),
	OFFSET(printk_record, ts_ns),
	{ "printk_record.rec_size", offsetof(struct printk_record, size) },
	OFFSET(printk_record, text_len),
	OFFSET(printk_record, level),
	OFFSET(printk_record, text),

	SIZE(stat),
	VALUE("hz", HZ),
#define __SYSCALL(nr, name) VALUE("nr." #name, nr),
	__SYSCALLS
#undef __SYSCALL
	VALUE("nr.host_task_create", HOST_NR_task_create),
	VALUE("nr.host_set_comm", HOST_NR_set_comm),
	VALUE("nr.host_call", HOST_NR_call),
	{ "", 0 },
};
