/* SPDX-License-Identifier: GPL-2.0-or-later */
/* jiffies, kernel timers, clocks and softirqs. */
#ifndef _TIMER_H
#define _TIMER_H

#include "list.h"

#define HZ 250
#define NSEC_PER_SEC 1000000000ULL
#define NSEC_PER_MSEC 1000000ULL
#define TICK_NSEC (NSEC_PER_SEC / HZ)
#define MAX_SCHEDULE_TIMEOUT LONG_MAX

/* Bits of a timer's flags, of which none is ever set here: the first CPU, the first wheel array. */
#define TIMER_CPUMASK 0x0003FFFF
#define TIMER_MIGRATING 0x00040000
#define TIMER_DEFERRABLE 0x00080000
#define TIMER_PINNED 0x00100000
#define TIMER_IRQSAFE 0x00200000
#define TIMER_ARRAYSHIFT 22
#define TIMER_TRACE_FLAGMASK (TIMER_MIGRATING | TIMER_DEFERRABLE | TIMER_PINNED | TIMER_IRQSAFE)

#define time_after_eq(a, b) ((long)((a) - (b)) >= 0)

extern u64 jiffies_64;
extern unsigned long volatile jiffies;

/* Linux's names for what it copies from and to user space; here all have the layout of timespec64. */
struct __kernel_timespec;
struct __kernel_old_timeval;
struct timezone;

/* Also what system calls take and give, on every machine. */
struct timespec64 {
	time64_t tv_sec;
	s64 tv_nsec;
};

struct timer_list {
	struct list_head entry;
	unsigned long expires;
	void (*function)(struct timer_list *timer);
	u32 flags;
};

void timer_setup(struct timer_list *timer, void (*func)(struct timer_list *timer));
int mod_timer(struct timer_list *timer, unsigned long expires);
void add_timer(struct timer_list *timer);
int del_timer(struct timer_list *timer);
int del_timer_sync(struct timer_list *timer);
bool timer_pending(const struct timer_list *timer);
unsigned long get_next_timer_interrupt(void);
void run_local_timers(void);
void update_process_times(int user_tick);
void do_timer(unsigned long ticks);
long schedule_timeout(long timeout);
long schedule_timeout_interruptible(long timeout);
long schedule_timeout_uninterruptible(long timeout);
void msleep(unsigned int msecs);
unsigned long msecs_to_jiffies(unsigned int m);
unsigned int jiffies_to_msecs(unsigned long j);

u64 sched_clock(void);
u64 local_clock(void);
ktime_t ktime_get(void);
void ktime_get_real_ts64(struct timespec64 *ts);
struct timespec64 ns_to_timespec64(s64 nsec);
int get_duration(u64 *ns, const struct __kernel_timespec __user *uts);
u64 nsecs_to_jiffies64(u64 n);
time64_t mktime64(unsigned int year0, unsigned int mon0, unsigned int day, unsigned int hour,
		  unsigned int min, unsigned int sec);

enum {
	HI_SOFTIRQ, TIMER_SOFTIRQ, NET_TX_SOFTIRQ, NET_RX_SOFTIRQ, BLOCK_SOFTIRQ, IRQ_POLL_SOFTIRQ,
	TASKLET_SOFTIRQ, SCHED_SOFTIRQ, HRTIMER_SOFTIRQ, RCU_SOFTIRQ, NR_SOFTIRQS
};
void open_softirq(int nr, void (*action)(void));
void raise_softirq_irqoff(unsigned int nr);
void raise_softirq(unsigned int nr);
void irq_enter(void);
void irq_exit(void);
void __do_softirq(void);

void timers_init(void);

#endif
