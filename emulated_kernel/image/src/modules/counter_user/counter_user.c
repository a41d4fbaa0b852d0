// SPDX-License-Identifier: GPL-2.0-or-later
// Uses another module, which stays loaded as long as this one.
#include "module.h"

MODULE_DESCRIPTION("uses the module counter");
MODULE_LICENSE("GPL");

long counter_add(long n);
long counter_read(void);
long counter_twice(long n);

noinline long counter_twice(long n)
{
	counter_add(n);
	return counter_add(n);
}

static int __init counter_user_init(void)
{
	counter_add(1);
	return 0;
}

static void __exit counter_user_exit(void)
{
	counter_add(-counter_read());
}

module_init(counter_user_init);
module_exit(counter_user_exit);
