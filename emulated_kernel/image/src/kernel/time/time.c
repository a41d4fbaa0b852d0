// SPDX-License-Identifier: GPL-2.0-or-later
// Conversions between units of time.
#include "timer.h"

struct timespec64 ns_to_timespec64(s64 nsec)
{
	struct timespec64 ts = { nsec / (s64)NSEC_PER_SEC, nsec % (s64)NSEC_PER_SEC };

	if (ts.tv_nsec < 0) {
		ts.tv_sec--;
		ts.tv_nsec += NSEC_PER_SEC;
	}
	return ts;
}

unsigned long msecs_to_jiffies(unsigned int m)
{
	return DIV_ROUND_UP((unsigned long)m * HZ, 1000);
}

unsigned int jiffies_to_msecs(unsigned long j)
{
	return j * 1000 / HZ;
}

u64 nsecs_to_jiffies64(u64 n)
{
	return n / TICK_NSEC;
}

/* Seconds since 1970 of a date of the Gregorian calendar (Gauss; March is the first month). */
time64_t mktime64(unsigned int year0, unsigned int mon0, unsigned int day, unsigned int hour,
		  unsigned int min, unsigned int sec)
{
	unsigned int mon = mon0 > 2 ? mon0 - 2 : mon0 + 10, year = mon0 > 2 ? year0 : year0 - 1;
	time64_t days = (time64_t)(year / 4 - year / 100 + year / 400 + 367 * mon / 12 + day) +
			year * 365 - 719499;

	return ((days * 24 + hour) * 60 + min) * 60 + sec;
}
