// SPDX-License-Identifier: GPL-2.0-or-later
// A module to be probed: of every kind of function one.
#include "bug.h"
#include "errno.h"
#include "module.h"
#include "printk.h"
#include "uaccess.h"

MODULE_DESCRIPTION("functions to probe");
MODULE_LICENSE("GPL");

long ktgt_add(long a, long b);
int ktgt_str(const char *s);
int ktgt_np(int x);
int ktgt_notrace(int x);
long ktgt_peek(const unsigned long *addr);
int ktgt_warn(int x);
int ktgt_initfn(int x);

int ktgt_data = 42;

noinline long ktgt_add(long a, long b)
{
	ktgt_data++;
	return a + b;
}

noinline int ktgt_str(const char *s)
{
	int sum = 0;

	while (*s)
		sum += *s++;
	return sum;
}

noinline int ktgt_np(int x)
{
	return ktgt_data ^ x;
}
NOKPROBE_SYMBOL(ktgt_np);

noinline notrace int ktgt_notrace(int x)
{
	return ktgt_data - x;
}

/* What is at an address; -1 where nothing is: the fault is fixed up within the module. */
noinline long ktgt_peek(const unsigned long *addr)
{
	unsigned long word;

	return __load_long_nofault(&word, addr) ? -1 : (long)word;
}

noinline int ktgt_warn(int x)
{
	return WARN_ON(x > 10) ? -EINVAL : x;
}

/* Can be hit while the module loads, and is gone afterwards. */
noinline __init int ktgt_initfn(int x)
{
	return 2 * x;
}

static __init int ktgt_init(void)
{
	ktgt_data = ktgt_initfn(21);
	pr_info("ktgt: loaded\n");
	return 0;
}

static __exit void ktgt_exit(void)
{
	pr_info("ktgt: unloaded\n");
}

module_init(ktgt_init);
module_exit(ktgt_exit);
