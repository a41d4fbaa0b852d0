/* SPDX-License-Identifier: GPL-2.0-or-later */
/* How an oops report looks. */
#ifndef _ASM_STACKTRACE_H
#define _ASM_STACKTRACE_H

#define show_die(str, err, number) pr_emerg("%s [#%d]\n", str, ((void)(err), number))
#define show_trace_start(loglvl) do { } while (0)
#define show_trace_entry(loglvl, addr) printk("%s[<%016lx>] %pB\n", loglvl, addr, (void *)(addr))
#define show_trace_end(loglvl) do { } while (0)

#endif
