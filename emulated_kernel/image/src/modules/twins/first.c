// SPDX-License-Identifier: GPL-2.0-or-later
// One of two functions of the same name.
#include "module.h"

MODULE_DESCRIPTION("two functions of one name");
MODULE_LICENSE("GPL");

int first_twin(int x);
int twins_init(void);
void twins_exit(void);

static noinline int twin(int x)
{
	return x + 1;
}

int first_twin(int x)
{
	return twin(x) * 2;
}

int __init twins_init(void)
{
	return 0;
}

void __exit twins_exit(void)
{
}

module_init(twins_init);
module_exit(twins_exit);
