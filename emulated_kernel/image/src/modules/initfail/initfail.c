// SPDX-License-Identifier: GPL-2.0-or-later
// Changes its mind while it is loaded.
#include "errno.h"
#include "module.h"

MODULE_DESCRIPTION("fails to initialise");
MODULE_LICENSE("GPL");

int initfail_probe(void);

noinline int initfail_probe(void)
{
	return -ENODEV;
}

static int __init initfail_init(void)
{
	return initfail_probe();
}

static void __exit initfail_exit(void)
{
}

module_init(initfail_init);
module_exit(initfail_exit);
