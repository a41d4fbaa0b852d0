// SPDX-License-Identifier: GPL-2.0-or-later
// Stands for Linux's sample of the same name: its init lets another context call a function.
#include "module.h"
#include "printk.h"
#include "sched.h"
#include "workqueue.h"

MODULE_DESCRIPTION("prints from its init and from a worker");
MODULE_LICENSE("GPL");

static struct work_struct irqwork;

static noinline void trace_printk_irq_work(struct work_struct *work)
{
	pr_info("trace_printk: %s work %p\n", "deferred", work);
}

static int __init trace_printk_init(void)
{
	INIT_WORK(&irqwork, trace_printk_irq_work);
	pr_info("trace_printk: loaded\n");
	schedule_work(&irqwork);
	flush_work(&irqwork);
	return 0;
}

static void __exit trace_printk_exit(void)
{
}

module_init(trace_printk_init);
module_exit(trace_printk_exit);
