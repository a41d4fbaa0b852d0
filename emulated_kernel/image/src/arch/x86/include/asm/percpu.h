/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Per-CPU variables: linked from address 0, reached through the base of gs (x86_64) or fs (i386). */
#ifndef _ASM_PERCPU_H
#define _ASM_PERCPU_H

#include "types.h"

#define DECLARE_PER_CPU(type, name) extern __section(".data..percpu") typeof(type) name
#define DEFINE_PER_CPU(type, name) __section(".data..percpu") typeof(type) name

#ifdef CONFIG_X86_32
#define __PERCPU_SEG "fs"
#define __percpu_space __seg_fs
#else
#define __PERCPU_SEG "gs"
#define __percpu_space __seg_gs
#endif

#define __my_cpu(var) (*(volatile typeof(var) __percpu_space *)(uintptr_t)&(var))
#define this_cpu_read(var) __my_cpu(var)
#define this_cpu_write(var, val) (__my_cpu(var) = (val))
#define this_cpu_add_32(var, val) \
	__asm__ __volatile__("addl %1, %%" __PERCPU_SEG ":%P0" : : "i"(&(var)), "ri"((u32)(val)) : "memory", "cc")
#define this_cpu_inc(var) (__my_cpu(var)++)

DECLARE_PER_CPU(unsigned long, this_cpu_off);
#define this_cpu_ptr(ptr) ((typeof(ptr))((uintptr_t)(ptr) + this_cpu_read(this_cpu_off)))
#define per_cpu_ptr(ptr, cpu) ((typeof(ptr))((uintptr_t)(ptr) + __per_cpu_offset[cpu]))

#define NR_CPUS 64
extern unsigned long __per_cpu_offset[NR_CPUS];
DECLARE_PER_CPU(int, cpu_number);
#define smp_processor_id() this_cpu_read(cpu_number)

#endif
