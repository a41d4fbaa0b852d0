/* SPDX-License-Identifier: GPL-2.0-or-later */
/*
 * Per-CPU variables: linked from address 0, reached through gp, which no code uses for small data.
 *
 * Each access is one instruction: a task that is preempted and goes on elsewhere never mixes two CPUs.
 * Deviates: Linux adds an offset from a table, with preemption off.
 */
#ifndef _ASM_PERCPU_H
#define _ASM_PERCPU_H

#include "types.h"

#define DECLARE_PER_CPU(type, name) extern __section(".data..percpu") typeof(type) name
#define DEFINE_PER_CPU(type, name) __section(".data..percpu") typeof(type) name

register unsigned long __my_cpu_offset __asm__("gp");

#define __my_cpu_load(insn, var) ({                                        \
	unsigned long _word;                                               \
	__asm__ __volatile__(insn " %0, %%lo(%1)(gp)"                      \
			     : "=r"(_word) : "i"(&(var)) : "memory");      \
	_word; })
#define __my_cpu_store(insn, var, val)                                     \
	__asm__ __volatile__(insn " %z0, %%lo(%1)(gp)"                     \
			     : : "rJ"((unsigned long)(val)), "i"(&(var)) : "memory")

#define this_cpu_read(var)                                                 \
	((typeof(var))(sizeof(var) == 8 ? __my_cpu_load("ld", var) :       \
		       sizeof(var) == 4 ? __my_cpu_load("lwu", var) :      \
					  __my_cpu_load("lbu", var)))
#define this_cpu_write(var, val) do {                                      \
	if (sizeof(var) == 8)                                              \
		__my_cpu_store("sd", var, val);                            \
	else if (sizeof(var) == 4)                                         \
		__my_cpu_store("sw", var, val);                            \
	else                                                               \
		__my_cpu_store("sb", var, val);                            \
} while (0)
/* An interrupt in between leaves the variable as it found it. */
#define this_cpu_add_32(var, val) this_cpu_write(var, this_cpu_read(var) + (val))
#define this_cpu_inc(var) this_cpu_write(var, this_cpu_read(var) + 1)

#define this_cpu_ptr(ptr) ((typeof(ptr))((uintptr_t)(ptr) + __my_cpu_offset))
#define per_cpu_ptr(ptr, cpu) ((typeof(ptr))((uintptr_t)(ptr) + __per_cpu_offset[cpu]))

#define NR_CPUS 64
extern unsigned long __per_cpu_offset[NR_CPUS];
DECLARE_PER_CPU(int, cpu_number);
DECLARE_PER_CPU(unsigned long, this_cpu_off); /* gp, for handlers that the host makes */
#define smp_processor_id() this_cpu_read(cpu_number)

#endif
