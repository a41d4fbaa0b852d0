// SPDX-License-Identifier: GPL-2.0-or-later
// A kprobe with handlers before and behind the instruction; every process that is made hits it.
#include "errno.h"
#include "kprobes.h"
#include "module.h"
#include "printk.h"

MODULE_DESCRIPTION("a kprobe on kernel_clone");
MODULE_LICENSE("GPL");

static int before(struct kprobe *p, struct pt_regs *regs)
{
	pr_info("%s: pre_handler: p->addr = %p, ip = %lx\n", p->symbol_name, p->addr,
		instruction_pointer(regs));
	return 0;
}

static void after(struct kprobe *p, struct pt_regs *regs, unsigned long flags)
{
	pr_info("%s: post_handler: ip - p->addr = %ld, flags = %lx\n", p->symbol_name,
		(long)(instruction_pointer(regs) - (unsigned long)p->addr), flags);
}

static struct kprobe probe = {
	.symbol_name = "kernel_clone",
	.pre_handler = before,
	.post_handler = after,
};

static int __init kprobe_example_init(void)
{
	int err = register_kprobe(&probe);

	if (err < 0) {
		pr_err("kprobe_example: register_kprobe returned %d\n", err);
		return err;
	}
	pr_info("kprobe_example: planted at %p\n", probe.addr);
	return 0;
}

static void __exit kprobe_example_exit(void)
{
	unregister_kprobe(&probe);
	pr_info("kprobe_example: unregistered, %lu missed\n", probe.nmissed);
}

module_init(kprobe_example_init);
module_exit(kprobe_example_exit);
