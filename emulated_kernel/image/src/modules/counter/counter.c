// SPDX-License-Identifier: GPL-2.0-or-later
// A counter that other modules can use.
#include "module.h"

MODULE_DESCRIPTION("exports a counter");
MODULE_LICENSE("GPL");

long counter_add(long n);
long counter_read(void);

static long count;

noinline long counter_add(long n)
{
	count += n;
	return count;
}
EXPORT_SYMBOL(counter_add);

noinline long counter_read(void)
{
	return count;
}
EXPORT_SYMBOL(counter_read);

static int __init counter_init(void)
{
	return 0;
}

static void __exit counter_exit(void)
{
}

module_init(counter_init);
module_exit(counter_exit);
