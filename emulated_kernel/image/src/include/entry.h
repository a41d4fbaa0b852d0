/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Ways into and out of the kernel, and what happens to tasks that took a wrong one. */
#ifndef _ENTRY_H
#define _ENTRY_H

#include "types.h"
#include <asm/entry.h>
#include <asm/ptrace.h>

extern char host_user_hlt[], host_user_resume[];
extern char host_hypercall_hlt[], host_hypercall_resume[];
extern char host_idle_hlt[], host_idle_resume[];
extern char ret_from_fork[];

struct boot_params;
struct task_struct;
void do_host_interrupt(struct pt_regs *regs);
void call_on_irq_stack(void (*func)(struct pt_regs *), struct pt_regs *regs);
void start_kernel(void) __noreturn;
void setup_arch(void);
void host_park(struct task_struct *wake);
long host_syscall(struct pt_regs *regs, int nr);

/* kernel/entry.c, irq.c */
void host_restart_hypercall(struct pt_regs *regs);
void irqentry_exit(struct pt_regs *regs);
void do_irq(struct pt_regs *regs, unsigned long vector);

/* kernel/extable.c, dumpstack.c; the last two: arch */
int fixup_exception(struct pt_regs *regs);
void die(const char *str, struct pt_regs *regs, long err);
void __show_regs(struct pt_regs *regs);

#endif
