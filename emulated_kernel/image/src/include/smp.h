/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Several CPUs: which there are, how one interrupts another, and how it waits for it. */
#ifndef _SMP_H
#define _SMP_H

#include "types.h"
#include <asm/irqflags.h>
#include <asm/percpu.h>

extern unsigned int nr_cpu_ids;
extern u64 __cpu_online_mask;

#define cpumask_of(cpu) (1ULL << (cpu))
#define cpu_online(cpu) ((READ_ONCE(__cpu_online_mask) & cpumask_of(cpu)) != 0)
#define for_each_possible_cpu(cpu) for ((cpu) = 0; (cpu) < (int)nr_cpu_ids; (cpu)++)
#define for_each_online_cpu(cpu) for_each_possible_cpu(cpu) if (cpu_online(cpu))

struct pt_regs;
typedef void (*smp_call_func_t)(void *info);

/* All CPUs of the machine run in turns: who waits for another one has to let it. */
void host_yield(void);
#define smp_cond_wait(condition) do {                                      \
	while (!(condition)) {                                             \
		cpu_relax();                                               \
		if (nr_cpu_ids > 1)                                        \
			host_yield();                                      \
	}                                                                  \
} while (0)

void smp_send_reschedule(int cpu);
void generic_smp_call_function_interrupt(void);
void sysvec_sync_core(struct pt_regs *regs);
int smp_call_function_single(int cpu, smp_call_func_t func, void *info, int wait);
void smp_call_function(smp_call_func_t func, void *info, int wait);
void on_each_cpu(smp_call_func_t func, void *info, int wait);
void setup_per_cpu_areas(void);
void set_cpu_online(int cpu);
void smp_init(void);
void start_secondary(void);

/* arch */
struct task_struct;
extern char host_secondary_entry[];
void arch_setup_cpu(int cpu, char *irq_stack_top);
void sync_core(void);

#endif
