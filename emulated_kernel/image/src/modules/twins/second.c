// SPDX-License-Identifier: GPL-2.0-or-later
// The other function of the same name.
#include "types.h"

int second_twin(int x);

static noinline int twin(int x)
{
	return x + 2;
}

int second_twin(int x)
{
	return twin(x) * 3;
}
