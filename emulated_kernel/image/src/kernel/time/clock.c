// SPDX-License-Identifier: GPL-2.0-or-later
// Clocks: nanoseconds since boot and since the epoch, both from the host's clock.
#include "errno.h"
#include "host_abi.h"
#include "hrtimer.h"
#include "sched.h"
#include "syscalls.h"
#include "timer.h"
#include "uaccess.h"

u64 notrace sched_clock(void)
{
	return __sync_add_and_fetch(&host_clock.now_ns, host_clock.step_ns);
}

u64 notrace local_clock(void)
{
	return sched_clock();
}

ktime_t ktime_get(void)
{
	return sched_clock();
}

void ktime_get_real_ts64(struct timespec64 *ts)
{
	*ts = ns_to_timespec64(boot_params.boot_ns + ktime_get());
}

static long put_timespec64(const struct timespec64 *ts, void __user *uts)
{
	return copy_to_user(uts, ts, sizeof(*ts)) ? -EFAULT : 0;
}

SYSCALL_DEFINE2(clock_gettime, const clockid_t, which_clock, struct __kernel_timespec __user *, tp)
{
	struct timespec64 ts;

	if (which_clock == 0)
		ktime_get_real_ts64(&ts);
	else if (which_clock == 1)
		ts = ns_to_timespec64(ktime_get());
	else
		return -EINVAL;
	return put_timespec64(&ts, tp);
}

SYSCALL_DEFINE2(gettimeofday, struct __kernel_old_timeval __user *, tv, struct timezone __user *, tz)
{
	struct timespec64 ts;

	if (tz)
		return -EINVAL;
	ktime_get_real_ts64(&ts);
	ts.tv_nsec /= 1000;
	return put_timespec64(&ts, tv);
}

/* Nanoseconds. */
int get_duration(u64 *ns, const struct __kernel_timespec __user *uts)
{
	struct timespec64 ts;

	if (copy_from_user(&ts, uts, sizeof(ts)))
		return -EFAULT;
	if (ts.tv_sec < 0 || ts.tv_nsec < 0 || ts.tv_nsec >= (s64)NSEC_PER_SEC)
		return -EINVAL;
	*ns = (u64)ts.tv_sec * NSEC_PER_SEC + ts.tv_nsec;
	return 0;
}

SYSCALL_DEFINE2(nanosleep, struct __kernel_timespec __user *, rqtp,
		struct __kernel_timespec __user *, rmtp)
{
	u64 ns;
	int err = get_duration(&ns, rqtp);

	if (err)
		return err;
	if (rmtp)
		return -EINVAL;
	return hrtimer_nanosleep(ns, HRTIMER_MODE_REL, CLOCK_MONOTONIC);
}
