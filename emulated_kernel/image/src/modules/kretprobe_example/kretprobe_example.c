// SPDX-License-Identifier: GPL-2.0-or-later
// A return probe: what kernel_clone returned, and how long it took.
#include "errno.h"
#include "kprobes.h"
#include "module.h"
#include "printk.h"
#include "sched.h"
#include "timer.h"

MODULE_DESCRIPTION("a return probe on kernel_clone");
MODULE_LICENSE("GPL");

/* Of each call, from its entry to its return. */
struct call {
	ktime_t entered;
};

/* Calls of kernel threads are none of ours. */
static int entered(struct kretprobe_instance *ri, struct pt_regs *regs __attribute__((unused)))
{
	struct call *call = (struct call *)ri->data;

	if (current->flags & PF_KTHREAD)
		return 1;
	call->entered = ktime_get();
	return 0;
}

static int returned(struct kretprobe_instance *ri, struct pt_regs *regs)
{
	const struct call *call = (const struct call *)ri->data;
	struct kretprobe *rp = get_kretprobe(ri);

	pr_info("%s returned %ld and took %lld ns\n", rp->kp.symbol_name, (long)regs_return_value(regs),
		(long long)(ktime_get() - call->entered));
	return 0;
}

static struct kretprobe probe = {
	.kp.symbol_name = "kernel_clone",
	.entry_handler = entered,
	.handler = returned,
	.data_size = sizeof(struct call),
	.maxactive = 20,
};

static int __init kretprobe_example_init(void)
{
	int err = register_kretprobe(&probe);

	if (err < 0) {
		pr_err("kretprobe_example: register_kretprobe returned %d\n", err);
		return err;
	}
	pr_info("kretprobe_example: planted at %p\n", probe.kp.addr);
	return 0;
}

static void __exit kretprobe_example_exit(void)
{
	unregister_kretprobe(&probe);
	pr_info("kretprobe_example: unregistered, %d instances missed\n", probe.nmissed);
}

module_init(kretprobe_example_init);
module_exit(kretprobe_example_exit);
