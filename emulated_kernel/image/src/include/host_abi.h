/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Numbers that the kernel and the host (emulated_kernel/util/abi.py) share. */
#ifndef _HOST_ABI_H
#define _HOST_ABI_H

#define HYPERCALL_IDLE 0
#define HYPERCALL_RETURN 1
#define HYPERCALL_USER 2
#define HYPERCALL_HOSTFS 3
#define HYPERCALL_PANIC 4
#define HYPERCALL_BOOTED 5
#define HYPERCALL_MODULE 6
#define HYPERCALL_CPU_UP 7
#define HYPERCALL_YIELD 8
#define HYPERCALL_KPROBES 9

#define HOSTFS_OPEN 0
/* Answers to HOSTFS_OPEN: the function that writes to the file; 0 stands for the general one. */
#define HOSTFS_TRACING_MARK 1
#define HOSTFS_TRACING_MARK_RAW 2
#define HOSTFS_READ 1
#define HOSTFS_WRITE 2
#define HOSTFS_MKDIR 3
#define HOSTFS_RMDIR 4

#define HOST_LOOKUP_DEFAULT 0 /* there, except where it is about to be made */
#define HOST_LOOKUP_MISSING 1
#define HOST_LOOKUP_EXISTS 2

#define HOST_NAMES_UNKNOWN 2 /* of task_struct.host_names */
#define HOST_REPLY_SIZE 8192

#define MODULE_OP_ALLOC 0
#define MODULE_OP_PLACE 1
#define MODULE_OP_FREE 2
#define MODULE_OP_NOTIFY 3

#define KPROBE_OP_REGISTER 0
#define KPROBE_OP_REGISTER_RETURN 1
#define KPROBE_OP_REGISTER_JPROBE 2
#define KPROBE_OP_UNREGISTER 3
#define KPROBE_OP_ENABLE 4
#define KPROBE_OP_DISABLE 5

#define VECTOR_DIVIDE_ERROR 0
#define VECTOR_DEBUG 1
#define VECTOR_BREAKPOINT 3
#define VECTOR_INVALID_OPCODE 6
#define VECTOR_GENERAL_PROTECTION 13
#define VECTOR_PAGE_FAULT 14
#define VECTOR_TIMER 32
#define VECTOR_WAKE 33
#define VECTOR_WATCHDOG 34
#define VECTOR_RESCHEDULE 35
#define VECTOR_CALL_FUNCTION 36
#define VECTOR_SYNC_CORE 37

/* System calls of ours; the numbers of Linux are below. */
#define HOST_NR_BASE 1001
#define HOST_NR_task_create 1001
#define HOST_NR_set_comm 1002
#define HOST_NR_call 1003
#define HOST_NR_END 1004

#ifndef __ASSEMBLY__
#include "types.h"

struct boot_params {
	u64 ram_start;   /* physical address of the first free byte after the image */
	u64 ram_end;     /* physical address of the first byte after the memory */
	u64 page_offset; /* virtual address of the direct map of physical 0 */
	u32 nr_cpus;
	u32 hz;
	u64 boot_ns;     /* wall clock at boot, nanoseconds since the epoch */
	u64 seed;
};

struct host_clock {
	u64 now_ns;
	u64 step_ns;
};

/* 48 bytes on every machine; an address is no constant of more than a word. */
struct host_abi_entry {
	char name[40];
	unsigned long value __aligned(8);
};

/* What ended since boot; the host reads it to learn of tasks that died by themselves. */
#define HOST_EXIT_RING 64
struct host_exit_record {
	u64 task;
	s32 pid;
	s32 code;
};
struct host_exits {
	u64 count;
	struct host_exit_record ring[HOST_EXIT_RING];
};

extern struct boot_params boot_params;
extern struct host_clock host_clock;
extern struct host_exits host_exits;

long host_hypercall(unsigned long nr, unsigned long a0, unsigned long a1, unsigned long a2,
		    unsigned long a3);
void host_idle(u64 ns);
#endif

#endif
