// SPDX-License-Identifier: GPL-2.0-or-later
// First C code: takes over what the host left in the boot parameters.
#include "entry.h"
#include "host_abi.h"
#include "kallsyms.h"
#include "sched.h"
#include "smp.h"
#include "timer.h"

struct boot_params boot_params;
struct host_clock host_clock __aligned(8); /* on i386 too: its time is added to at once */
unsigned long page_offset_base;
DECLARE_PER_CPU(char *, hardirq_stack_ptr);

char init_stack[THREAD_SIZE] __aligned(4096);
static char irq_stack_backing_store[THREAD_SIZE] __aligned(4096);

__visible __init notrace void ARCH_START_KERNEL(struct boot_params *params)
{
	boot_params = *params;
	page_offset_base = (unsigned long)boot_params.page_offset;
	__per_cpu_offset[0] = (unsigned long)__per_cpu_load;
	this_cpu_write(this_cpu_off, __per_cpu_offset[0]);
	start_kernel();
}

__init void arch_setup_cpu(int cpu, char *irq_stack_top)
{
	*per_cpu_ptr(&hardirq_stack_ptr, cpu) = irq_stack_top;
}

__init void setup_arch(void)
{
	arch_setup_cpu(0, irq_stack_backing_store + THREAD_SIZE);
	setup_per_cpu_areas();
}
