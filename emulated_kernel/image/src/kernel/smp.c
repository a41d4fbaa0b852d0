// SPDX-License-Identifier: GPL-2.0-or-later
// The other CPUs: their per-CPU areas, how they are brought up, and calls from one to another.
#include "atomic.h"
#include "bug.h"
#include "entry.h"
#include "host_abi.h"
#include "kallsyms.h"
#include "printk.h"
#include "sched.h"
#include "smp.h"
#include "string.h"
#include <asm/sync_core.h>

unsigned long __per_cpu_offset[NR_CPUS];
unsigned int nr_cpu_ids = 1;
u64 __cpu_online_mask = 1;
DEFINE_PER_CPU(unsigned long, this_cpu_off);
DEFINE_PER_CPU(int, cpu_number);
/* Interrupts that other CPUs have sent: a bit for each vector from VECTOR_TIMER on. The host delivers them. */
DEFINE_PER_CPU(u32, host_irr);
/* How often the host has made this CPU execute a serialising instruction. */
DEFINE_PER_CPU(u32, host_syncs);

/* A call that a CPU was asked for; one at a time for each sender. */
struct call_single_data {
	struct call_single_data *next;
	smp_call_func_t func;
	void *info;
	u32 locked;
};
static DEFINE_PER_CPU(struct call_single_data *, call_single_queue);
static DEFINE_PER_CPU(struct call_single_data, csd_data);

#define per_cpu(var, cpu) (*per_cpu_ptr(&(var), cpu))

static char *take_boot_memory(unsigned long size)
{
	char *memory = __va((unsigned long)ALIGN(boot_params.ram_start, PAGE_SIZE));

	boot_params.ram_start = ALIGN(boot_params.ram_start, PAGE_SIZE) + size;
	return memory;
}

/* Before the page allocator: the areas are copies of what is linked, and stay for ever. */
__init void setup_per_cpu_areas(void)
{
	unsigned long size = (unsigned long)__per_cpu_reserved + (unsigned long)__per_cpu_reserved_size;
	char *area;
	int cpu;

	nr_cpu_ids = min(boot_params.nr_cpus, (u32)NR_CPUS);
	for (cpu = 1; cpu < (int)nr_cpu_ids; cpu++) {
		area = take_boot_memory(size);
		memcpy(area, __per_cpu_load, (unsigned long)__per_cpu_size);
		__per_cpu_offset[cpu] = (unsigned long)area;
		per_cpu(this_cpu_off, cpu) = (unsigned long)area;
		per_cpu(cpu_number, cpu) = cpu;
		arch_setup_cpu(cpu, take_boot_memory(THREAD_SIZE) + THREAD_SIZE);
	}
}

static void send_ipi(int cpu, int vector)
{
	__atomic_fetch_or(per_cpu_ptr(&host_irr, cpu), 1U << (vector - VECTOR_TIMER), __ATOMIC_SEQ_CST);
}

noinline void smp_send_reschedule(int cpu)
{
	send_ipi(cpu, VECTOR_RESCHEDULE);
}

static noinline void smp_call_function_ipi(int cpu)
{
	send_ipi(cpu, VECTOR_CALL_FUNCTION);
}

static __always_inline void csd_lock_wait(struct call_single_data *csd)
{
	smp_cond_wait(!READ_ONCE(csd->locked));
}

static noinline void generic_exec_single(int cpu, struct call_single_data *csd)
{
	struct call_single_data **queue = per_cpu_ptr(&call_single_queue, cpu);
	struct call_single_data *first = READ_ONCE(*queue);

	do
		csd->next = first;
	while (!__atomic_compare_exchange_n(queue, &first, csd, false, __ATOMIC_RELEASE,
					    __ATOMIC_RELAXED));
	smp_call_function_ipi(cpu);
}

/* The queue is a stack: it is turned round, so that calls run in the order they were asked for. */
static __always_inline struct call_single_data *reverse(struct call_single_data *csd)
{
	struct call_single_data *done = NULL, *next;

	for (; csd; csd = next) {
		next = csd->next;
		csd->next = done;
		done = csd;
	}
	return done;
}

void generic_smp_call_function_interrupt(void)
{
	struct call_single_data *csd, *next;

	csd = __atomic_exchange_n(this_cpu_ptr(&call_single_queue), NULL, __ATOMIC_ACQUIRE);
	for (csd = reverse(csd); csd; csd = next) {
		next = csd->next;
		csd->func(csd->info);
		__atomic_store_n(&csd->locked, 0, __ATOMIC_RELEASE);
	}
}

noinline notrace void sync_core(void)
{
	serialize();
}
NOKPROBE_SYMBOL(sync_core);

/* As little as can be: text that any probe may stand in is being patched. */
noinstr void sysvec_sync_core(struct pt_regs *regs __attribute__((unused)))
{
	sync_core();
	this_cpu_inc(host_syncs);
}

static void call_here(smp_call_func_t func, void *info)
{
	unsigned long flags;

	local_irq_save(flags);
	func(info);
	local_irq_restore(flags);
}

/* Interrupts must be on: two CPUs that call each other would wait for ever. */
int smp_call_function_single(int cpu, smp_call_func_t func, void *info, int wait)
{
	struct call_single_data here, *csd = &here;

	WARN_ON_ONCE(irqs_disabled());
	preempt_disable();
	if (cpu == smp_processor_id()) {
		call_here(func, info);
		goto out;
	}
	if (!wait) {
		csd = this_cpu_ptr(&csd_data);
		csd_lock_wait(csd);
	}
	csd->func = func;
	csd->info = info;
	csd->locked = 1;
	generic_exec_single(cpu, csd);
	if (wait)
		csd_lock_wait(csd);
out:
	preempt_enable();
	return 0;
}

void smp_call_function(smp_call_func_t func, void *info, int wait)
{
	int cpu;

	preempt_disable();
	for_each_online_cpu(cpu) {
		if (cpu != smp_processor_id())
			smp_call_function_single(cpu, func, info, wait);
	}
	preempt_enable();
}

void on_each_cpu(smp_call_func_t func, void *info, int wait)
{
	preempt_disable();
	smp_call_function(func, info, wait);
	call_here(func, info);
	preempt_enable();
}

void set_cpu_online(int cpu)
{
	__sync_fetch_and_or(&__cpu_online_mask, cpumask_of(cpu));
}

/* Where another CPU begins: on the stack of its idle task, with preemption and interrupts off. */
__visible notrace void start_secondary(void)
{
	set_cpu_online(smp_processor_id());
	local_irq_enable();
	cpu_startup_entry();
}
NOKPROBE_SYMBOL(start_secondary);

static __init int cpu_up(int cpu)
{
	struct task_struct *idle = fork_idle(cpu);

	if (!idle)
		return -1;
	init_idle(idle, cpu);
	per_cpu(current_task, cpu) = idle;
	host_hypercall(HYPERCALL_CPU_UP, cpu, (unsigned long)host_secondary_entry,
		       (unsigned long)task_pt_regs(idle), __per_cpu_offset[cpu]);
	smp_cond_wait(cpu_online(cpu));
	return 0;
}

__init void smp_init(void)
{
	int cpu, online = 1;

	for (cpu = 1; cpu < (int)nr_cpu_ids; cpu++) {
		if (cpu_up(cpu))
			pr_err("smp: no memory for CPU %d\n", cpu);
		else
			online++;
	}
	if (nr_cpu_ids > 1)
		pr_info("smp: Brought up 1 node, %d CPUs\n", online);
}
