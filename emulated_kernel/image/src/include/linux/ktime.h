/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Times of ktime_get(), which are nanoseconds. */
#ifndef _LINUX_KTIME_H
#define _LINUX_KTIME_H

#include "../timer.h"

static inline ktime_t ktime_sub(ktime_t later, ktime_t earlier)
{
	return later - earlier;
}

static inline s64 ktime_to_ns(ktime_t kt)
{
	return kt;
}

#endif
