// SPDX-License-Identifier: GPL-2.0-or-later
// The table by which the host learns of layouts, so that it knows none by heart.
#include "hrtimer.h"
#include "fs.h"
#include "host_abi.h"
#include "kallsyms.h"
#include "kprobes.h"
#include "mm.h"
#include "module.h"
#include "printk.h"
#include "sched.h"
#include "sock.h"
#include "syscalls.h"
#include <asm/host_abi.h>
#include <asm/unistd.h>

DECLARE_PER_CPU(struct task_struct *, host_mailbox);
DECLARE_PER_CPU(char *, hardirq_stack_ptr);
DECLARE_PER_CPU(u32, host_irr);
DECLARE_PER_CPU(u32, host_syncs);
DECLARE_PER_CPU(unsigned long, irqs_sum);
extern char __log_buf[];
extern u64 log_first_seq, log_next_seq;
extern u32 log_first_idx, log_next_idx;
extern char host_user_hlt[], host_hypercall_hlt[], host_idle_hlt[];
extern char rethook_flush_trap[], rethook_find_trap[];
extern unsigned long host_return_trampoline, host_native_return_trampoline;
void rethook_bug(bool is_kretprobe, unsigned long rp, unsigned long addr);
extern unsigned long host_jprobe_return;
extern char host_path[], host_reply[];
void host_return(void);

#define VALUE(name, value) { name, (unsigned long)(value) }
#define ENUM(name) VALUE("enum." #name, name)
#define OFFSET(type, member) { #type "." #member, offsetof(struct type, member) }
#define SIZE(type) { #type ".size", sizeof(struct type) }
#define PERCPU(symbol, name) { "percpu." name, (unsigned long)&symbol }
#define ADDRESS(symbol) { #symbol, (unsigned long)&symbol }

const struct host_abi_entry __guest_abi[] __used = {
	OFFSET(task_struct, stack),
	{ "task_struct.state", offsetof(struct task_struct, __state) },
	OFFSET(task_struct, flags),
	OFFSET(task_struct, on_rq),
	OFFSET(task_struct, cpu),
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
	OFFSET(task_struct, host_fd),
	OFFSET(task_struct, host_real_fd),
	OFFSET(task_struct, host_names),
	OFFSET(task_struct, host_lookup),
	OFFSET(task_struct, start_time),
	OFFSET(task_struct, utime),
	OFFSET(task_struct, stime),
	OFFSET(task_struct, mm),
	OFFSET(task_struct, rethooks),
	OFFSET(task_struct, ret_stack),
	OFFSET(task_struct, curr_ret_stack),
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
	{ "init_stack.top", (unsigned long)(init_stack + THREAD_SIZE) },

	{ "percpu.base", (unsigned long)__per_cpu_load },
	{ "percpu.size", (unsigned long)__per_cpu_size },
	VALUE("percpu.reserved", __per_cpu_reserved),
	VALUE("percpu.reserved_size", __per_cpu_reserved_size),
	PERCPU(current_task, "current_task"),
	PERCPU(__preempt_count, "preempt_count"),
	PERCPU(__need_resched, "need_resched"),
	PERCPU(host_mailbox, "host_mailbox"),
	PERCPU(hardirq_stack_ptr, "hardirq_stack_ptr"),
	PERCPU(cpu_number, "cpu_number"),
	PERCPU(this_cpu_off, "this_cpu_off"),
	PERCPU(host_irr, "host_irr"),
	PERCPU(host_syncs, "host_syncs"),
	{ "percpu.idle_task", (unsigned long)&runqueues.idle },
	ADDRESS(__per_cpu_offset),
	VALUE("percpu.max_cpus", NR_CPUS),
	PERCPU(irqs_sum, "irqs_sum"),
	PERCPU(runqueues, "runqueues"),
	OFFSET(rq, nr_running),
	OFFSET(rq, nr_switches),
	VALUE("preempt.hardirq_mask", HARDIRQ_MASK),
	VALUE("preempt.softirq_mask", SOFTIRQ_MASK),
	/* Which print formats name. */
	ENUM(HRTIMER_MODE_ABS),
	ENUM(HRTIMER_MODE_REL),
	ENUM(HRTIMER_MODE_ABS_PINNED),
	ENUM(HRTIMER_MODE_REL_PINNED),
	ENUM(HRTIMER_MODE_ABS_SOFT),
	ENUM(HRTIMER_MODE_REL_SOFT),
	ENUM(HRTIMER_MODE_ABS_PINNED_SOFT),
	ENUM(HRTIMER_MODE_REL_PINNED_SOFT),
	ENUM(HRTIMER_MODE_ABS_HARD),
	ENUM(HRTIMER_MODE_REL_HARD),
	ENUM(HRTIMER_MODE_ABS_PINNED_HARD),
	ENUM(HRTIMER_MODE_REL_PINNED_HARD),
	ENUM(TCP_ESTABLISHED),
	ENUM(TCP_SYN_SENT),
	ENUM(TCP_SYN_RECV),
	ENUM(TCP_FIN_WAIT1),
	ENUM(TCP_FIN_WAIT2),
	ENUM(TCP_TIME_WAIT),
	ENUM(TCP_CLOSE),
	ENUM(TCP_CLOSE_WAIT),
	ENUM(TCP_LAST_ACK),
	ENUM(TCP_LISTEN),
	ENUM(TCP_CLOSING),
	ENUM(TCP_NEW_SYN_RECV),

	SIZE(pt_regs),
	SIZE(boot_params),
	ADDRESS(host_clock),
	ADDRESS(host_path),
	ADDRESS(host_reply),
	ADDRESS(host_exits),
	VALUE("host_exits.ring", offsetof(struct host_exits, ring)),
	VALUE("host_exits.entries", HOST_EXIT_RING),
	VALUE("host_exit_record.size", sizeof(struct host_exit_record)),

	ARCH_ABI_ENTRIES
	ADDRESS(host_return),
	ADDRESS(host_user_hlt),
	ADDRESS(host_hypercall_hlt),
	ADDRESS(host_idle_hlt),
	ADDRESS(host_return_trampoline),
	ADDRESS(host_native_return_trampoline),
	ADDRESS(rethook_flush_trap),
	ADDRESS(rethook_find_trap),
	ADDRESS(rethook_bug),

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

	SIZE(page),
	OFFSET(zone, nr_free),
	OFFSET(zone, managed_pages),
	OFFSET(kmem_cache, size),
	OFFSET(kmem_cache, order),
	OFFSET(kmem_cache, objects),
	OFFSET(kmem_cache, nr_slabs),
	OFFSET(kmem_cache, nr_objects),
	OFFSET(kmem_cache, name),
	OFFSET(kmem_cache, list),
	ADDRESS(modules),
	OFFSET(module, state),
	OFFSET(module, refcnt),
	OFFSET(module, list),
	OFFSET(module, name),
	OFFSET(module, mem),
	OFFSET(module, kallsyms),
	OFFSET(module, syms),
	OFFSET(module, num_syms),
	OFFSET(module, extable),
	OFFSET(module, num_exentries),
	OFFSET(module, bug_table),
	OFFSET(module, num_bugs),
	OFFSET(module, ftrace_callsites),
	OFFSET(module, num_ftrace_callsites),
	OFFSET(module, kprobe_blacklist),
	OFFSET(module, num_kprobe_blacklist),
	OFFSET(module, kprobes_text_start),
	OFFSET(module, kprobes_text_size),
	OFFSET(module, noinstr_text_start),
	OFFSET(module, noinstr_text_size),
	OFFSET(module, source_list),
	OFFSET(module_memory, base),
	OFFSET(module_memory, size),
	{ "module_memory.size_of", sizeof(struct module_memory) },
	OFFSET(mod_kallsyms, num_symtab),
	OFFSET(mod_kallsyms, symtab),
	OFFSET(mod_kallsyms, strtab),
	OFFSET(mod_kallsyms, typetab),
	OFFSET(module_use, source),
	OFFSET(module_use, source_list),

	OFFSET(kprobe, nmissed),
	OFFSET(kprobe, addr),
	OFFSET(kprobe, symbol_name),
	OFFSET(kprobe, offset),
	OFFSET(kprobe, flags),
	OFFSET(kprobe, pre_handler),
	OFFSET(kprobe, post_handler),
	SIZE(kprobe),
	OFFSET(kretprobe, handler),
	OFFSET(kretprobe, entry_handler),
	OFFSET(kretprobe, maxactive),
	OFFSET(kretprobe, nmissed),
	OFFSET(kretprobe, data_size),
	OFFSET(kretprobe_instance, rp),
	OFFSET(kretprobe_instance, ret_addr),
	OFFSET(kretprobe_instance, task),
	OFFSET(kretprobe_instance, fp),
	OFFSET(kretprobe_instance, data),
	OFFSET(jprobe, entry),
	ADDRESS(host_jprobe_return),

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
