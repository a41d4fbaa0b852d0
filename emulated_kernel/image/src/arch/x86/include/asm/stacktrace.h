/* SPDX-License-Identifier: GPL-2.0-or-later */
/* How an oops report looks. */
#ifndef _ASM_STACKTRACE_H
#define _ASM_STACKTRACE_H

#define show_die(str, err, number) \
	printk(KERN_DEFAULT "%s: %04lx [#%d] PREEMPT\n", str, (err) & 0xffff, number)
#define show_trace_start(loglvl) printk("%s <TASK>\n", loglvl)
#define show_trace_entry(loglvl, addr) printk("%s ? %pB\n", loglvl, (void *)(addr))
#define show_trace_end(loglvl) printk("%s </TASK>\n", loglvl)

#endif
