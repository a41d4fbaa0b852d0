/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Tasks, their life and the scheduler. */
#ifndef _SCHED_H
#define _SCHED_H

#include "atomic.h"
#include "list.h"
#include "preempt.h"
#include "wait.h"
#include <asm/thread_info.h>

#define TASK_RUNNING 0x00000000
#define TASK_INTERRUPTIBLE 0x00000001
#define TASK_UNINTERRUPTIBLE 0x00000002
#define __TASK_STOPPED 0x00000004
#define __TASK_TRACED 0x00000008
#define EXIT_DEAD 0x00000010 /* in exit_state */
#define EXIT_ZOMBIE 0x00000020
#define TASK_PARKED 0x00000040
#define TASK_DEAD 0x00000080
#define TASK_NOLOAD 0x00000400
#define TASK_NEW 0x00000800
#define TASK_NORMAL (TASK_INTERRUPTIBLE | TASK_UNINTERRUPTIBLE)
#define TASK_IDLE (TASK_UNINTERRUPTIBLE | TASK_NOLOAD)
#define TASK_REPORT (TASK_RUNNING | TASK_INTERRUPTIBLE | TASK_UNINTERRUPTIBLE | __TASK_STOPPED | \
		     __TASK_TRACED | EXIT_DEAD | EXIT_ZOMBIE | TASK_PARKED)
#define TASK_REPORT_IDLE (TASK_REPORT + 1)
#define TASK_REPORT_MAX (TASK_REPORT_IDLE << 1)

#define PF_IDLE 0x00000002
#define PF_EXITING 0x00000004
#define PF_HOST 0x00000008 /* mirrors a process of the host */
#define PF_WQ_WORKER 0x00000020
#define PF_FORKNOEXEC 0x00000040
#define PF_NOFREEZE 0x00008000
#define PF_FROZEN 0x00010000 /* in the refrigerator; a task's own to change */
#define PF_KTHREAD 0x00200000

#define TASK_COMM_LEN 16
#define DEFAULT_PRIO 120
#define THREAD_SIZE_ORDER 2
#define THREAD_SIZE (PAGE_SIZE << THREAD_SIZE_ORDER)
#define TIME_SLICE 5
#define CPU_MASK_ALL (~0ULL)

#define CLONE_VM 0x00000100
#define CLONE_FS 0x00000200
#define CLONE_FILES 0x00000400
#define CLONE_VFORK 0x00004000
#define CLONE_THREAD 0x00010000
#define SIGPIPE 13
#define SIGCHLD 17
#define SI_USER 0
#define SI_KERNEL 0x80
#define CLD_EXITED 1 /* why SIGCHLD comes */
#define TRACE_SIGNAL_DELIVERED 0
#define SIGSEGV 11
#define SIGKILL 9

#define INIT_PID 1
#define PID_MAX 4194304

typedef struct { uid_t val; } kuid_t;
typedef struct { gid_t val; } kgid_t;
#define KUIDT_INIT(v) ((kuid_t){ v })
#define KGIDT_INIT(v) ((kgid_t){ v })

struct cred {
	atomic_t usage;
	kuid_t uid, euid, fsuid;
	kgid_t gid, egid, fsgid;
};

struct pid {
	atomic_t count;
	pid_t nr;
	struct task_struct *task;
	struct hlist_node node;
};

struct files_struct;
struct fs_struct;
struct pt_regs;

/* A task in a run queue. */
struct sched_entity {
	struct list_head group_node;
};

struct task_struct {
	struct thread_struct thread; /* first: arch code knows its offset */
	void *stack;
	u32 __state;
	u32 flags;
	atomic_t usage;
	int on_rq;
	int on_cpu;        /* its registers and stack are in use */
	int cpu;
	raw_spinlock_t pi_lock; /* taken before a run queue's: who wakes it */
	u64 cpus_mask;
	int exit_state;
	int exit_code;
	int exit_signal;     /* SIGCHLD: the parent waits for it; anything else: nobody does */
	int time_slice;
	int prio;
	pid_t pid;
	pid_t tgid;
	u64 host_file;       /* the host sets it before an open: its file id */
	pid_t host_clone_pid; /* the host sets it before a clone: the child's pid, or 0 */
	u32 umask;
	/* Of the system call that the host makes for a process of its own; all 0 otherwise. */
	u32 host_fd;         /* a descriptor as the process counts, + 1 */
	u32 host_real_fd;    /* what it is in the table that all of them share; an open sets it */
	u32 host_names;      /* behind each name in user memory, at PATH_MAX, stands what to walk instead;
				with HOST_NAMES_UNKNOWN the name itself can't be read */
	u32 host_lookup;     /* HOST_LOOKUP_*: what the host knows of a name of its own */
	char comm[TASK_COMM_LEN];
	struct cred *cred;
	struct files_struct *files;
	struct fs_struct *fs;
	struct task_struct *real_parent;
	struct list_head children;
	struct list_head sibling;
	struct list_head tasks;
	struct sched_entity se;
	struct pid *thread_pid;
	u64 start_time;
	u64 utime, stime;
	u64 nvcsw, nivcsw;
	u64 wait_start, sleep_start, block_start; /* since when it waits for a CPU, sleeps, or waits; or 0 */
	struct completion *vfork_done;
	wait_queue_head_t wait_chldexit;
	void *worker_private; /* of a kernel thread: its struct kthread */
	/* Shadow stacks of hooked returns, which only the host works on. */
	union {
		struct llist_head rethooks; /* pending calls: struct rethook_node */
		unsigned long nr_pending;   /* their number, with a table of instances */
	};
	unsigned long ret_stack;      /* the function graph's array, or 0 */
	unsigned long curr_ret_stack; /* always 0: the array itself says how much of it is in use */
	struct cred own_cred;
	struct pid own_pid;
	struct mm_struct *mm; /* the host gives one to init, and children inherit it; NULL for kernel threads */
};

struct kernel_clone_args {
	u64 flags;
	int exit_signal;
	int kthread;
	pid_t set_tid; /* wished-for pid; 0: any */
	int (*fn)(void *);
	void *fn_arg;
};

extern struct task_struct init_task;
extern struct task_struct *child_reaper;
extern spinlock_t tasklist_lock;
extern struct list_head init_tasks;
extern char init_stack[];
#define next_task_list (init_task.tasks)
#define for_each_process(p) list_for_each_entry(p, &init_task.tasks, tasks)
#define task_pt_regs(task) \
	((struct pt_regs *)((char *)(task)->stack + THREAD_SIZE) - 1)
#define task_cpu(task) READ_ONCE((task)->cpu)
#define current_cred() (current->cred)
#define set_current_state(state) WRITE_ONCE(current->__state, state)
#define __set_current_state(state) (current->__state = (state))

/* kernel/fork.c, exit.c, pid.c */
void fork_init(void);
struct task_struct *copy_process(struct pid *pid, int trace, int node,
				 struct kernel_clone_args *args);
pid_t kernel_clone(struct kernel_clone_args *args);
struct task_struct *fork_idle(int cpu);
pid_t kernel_thread(int (*fn)(void *), void *arg, unsigned long flags);
pid_t user_mode_thread(int (*fn)(void *), void *arg, unsigned long flags);
void put_task_struct(struct task_struct *tsk);
void free_task(struct task_struct *tsk);
void do_exit(long code) __noreturn;
void do_group_exit(int exit_code) __noreturn;
void make_task_dead(int signr) __noreturn;
void release_task(struct task_struct *p);
void exit_files(struct task_struct *tsk);
void exit_creds(struct task_struct *tsk);
struct pid *alloc_pid(struct pid *pid, pid_t set_tid);
void free_pid(struct pid *pid);
void attach_pid(struct task_struct *task, struct pid *pid);
struct pid *find_vpid(int nr);
struct task_struct *pid_task(struct pid *pid, int type);
struct task_struct *find_task_by_vpid(pid_t nr);
struct task_struct *find_get_task_by_vpid(pid_t nr);
void __set_task_comm(struct task_struct *tsk, const char *from, bool exec);
char *__get_task_comm(char *buf, size_t buf_size, struct task_struct *tsk);

static __always_inline void get_task_struct(struct task_struct *tsk)
{
	atomic_inc(&tsk->usage);
}

/* kernel/exit.c: the ended child's pid, and its exit code; 0 with WNOHANG where none has ended. */
#define WNOHANG 1
#define CSIGNAL 0xff
long kernel_wait4(pid_t upid, int *stat_addr, int options);
int kernel_execve(const char *filename);

/* kernel/signal.c */
int send_sig(int sig, struct task_struct *p, int priv);

/* kernel/rethook.c */
void rethook_init_task(struct task_struct *tsk);
void rethook_flush_task(struct task_struct *tsk);
unsigned long rethook_find_ret_addr(struct task_struct *tsk, unsigned long *slot);

/* arch */
int copy_thread(struct task_struct *p, const struct kernel_clone_args *args);
struct task_struct *__switch_to_asm(struct task_struct *prev, struct task_struct *next);
struct task_struct *__switch_to(struct task_struct *prev, struct task_struct *next);
void show_regs(struct pt_regs *regs);
void show_stack(struct task_struct *task, unsigned long *sp, const char *loglvl);
void dump_stack(void);

/* kernel/sched */
struct rq {
	raw_spinlock_t __lock;
	int cpu;
	u32 nr_running;
	struct list_head queue;
	struct task_struct *curr;
	struct task_struct *idle;
	u64 nr_switches;
	u64 clock;
};
DECLARE_PER_CPU(struct rq, runqueues);
#define this_rq() this_cpu_ptr(&runqueues)
#define cpu_rq(cpu) per_cpu_ptr(&runqueues, cpu)

enum { SM_NONE = 0, SM_PREEMPT = 1 };
void sched_init(void);
void init_idle(struct task_struct *idle, int cpu);
void sched_fork(unsigned long clone_flags, struct task_struct *p);
void schedule(void);
void schedule_idle(void);
void schedule_preempt_disabled(void);
void schedule_tail(struct task_struct *prev);
void preempt_schedule_irq(void);
void resched_curr(struct rq *rq);
void scheduler_tick(void);
int try_to_wake_up(struct task_struct *p, unsigned int state, int wake_flags);
int wake_up_process(struct task_struct *p);
int wake_up_state(struct task_struct *p, unsigned int state);
int default_wake_function(wait_queue_entry_t *curr, unsigned int mode, int wake_flags, void *key);
void wake_up_new_task(struct task_struct *p);
int set_cpus_allowed_ptr(struct task_struct *p, u64 new_mask);
long sched_setaffinity(pid_t pid, u64 in_mask);
long sched_getaffinity(pid_t pid, u64 *mask);
void host_enqueue_task(struct task_struct *p);
void do_task_dead(void) __noreturn;
void do_sched_yield(void);
int __cond_resched(void);
#define cond_resched() __cond_resched()
void yield(void);
void cpu_startup_entry(void) __noreturn;

/* kernel/kthread.c */
extern struct task_struct *kthreadd_task;
int kthreadd(void *unused);
struct task_struct *kthread_create_on_node(int (*threadfn)(void *), void *data, int node,
					   const char *name);
struct task_struct *kthread_run(int (*threadfn)(void *), void *data, const char *name);
bool kthread_should_stop(void);
int kthread_stop(struct task_struct *k);
void kthread_exit(long result) __noreturn;

#endif
