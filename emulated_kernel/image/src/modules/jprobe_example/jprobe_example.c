// SPDX-License-Identifier: GPL-2.0-or-later
// A jprobe: a function with the signature of gcd() sees its arguments.
#include "errno.h"
#include "kprobes.h"
#include "module.h"
#include "printk.h"

MODULE_DESCRIPTION("a jprobe on gcd");
MODULE_LICENSE("GPL");

static unsigned long seen_gcd(unsigned long a, unsigned long b)
{
	pr_info("jprobe_example: gcd(%lu, %lu)\n", a, b);
	jprobe_return();
}

static struct jprobe probe = {
	.kp.symbol_name = "gcd",
	.entry = seen_gcd,
};

static int __init jprobe_example_init(void)
{
	int err = register_jprobe(&probe);

	if (err < 0) {
		pr_err("jprobe_example: register_jprobe returned %d\n", err);
		return err;
	}
	pr_info("jprobe_example: planted at %p\n", probe.kp.addr);
	return 0;
}

static void __exit jprobe_example_exit(void)
{
	unregister_jprobe(&probe);
	pr_info("jprobe_example: unregistered\n");
}

module_init(jprobe_example_init);
module_exit(jprobe_example_exit);
