/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The freezer: tasks stand in the refrigerator from their next safe point on, until they are thawed. */
#ifndef _FREEZER_H
#define _FREEZER_H

#include "sched.h"

extern u32 pm_freezing;

bool refrigerator(void);
int freeze_processes(void);
void thaw_processes(void);

/* A safe point: it holds nothing that another task waits for. Whether it was frozen. */
static __always_inline bool try_to_freeze(void)
{
	return unlikely(READ_ONCE(pm_freezing)) && refrigerator();
}

#endif
