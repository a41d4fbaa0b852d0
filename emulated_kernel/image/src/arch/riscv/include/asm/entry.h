/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Names that assembly and C share: symbols of entry.S, and addresses that stand for a program's. */
#ifndef _ASM_ENTRY_H
#define _ASM_ENTRY_H

#define FAKE_USER_IP 0x10000
#define FAKE_USER_SP 0x3fffffe000

#ifndef __ASSEMBLY__
extern char host_user_hlt[], host_user_resume[];
extern char host_hypercall_hlt[], host_hypercall_resume[];
extern char host_idle_hlt[], host_idle_resume[];
extern char ret_from_fork[];

void handle_exception(void);
void do_host_interrupt(struct pt_regs *regs);
void do_trap_ecall_u(struct pt_regs *regs);
void call_on_irq_stack(void (*func)(struct pt_regs *), struct pt_regs *regs);
int fixup_exception(struct pt_regs *regs);
void __show_regs(struct pt_regs *regs);
void die(struct pt_regs *regs, const char *str);
void do_page_fault(struct pt_regs *regs);
void sysvec_timer(struct pt_regs *regs);
void sysvec_host_wake(struct pt_regs *regs);
void sysvec_watchdog(struct pt_regs *regs);
void sysvec_reschedule_ipi(struct pt_regs *regs);
void sysvec_call_function(struct pt_regs *regs);
void setup_arch(void);
void host_park(struct task_struct *wake);
long host_syscall(struct pt_regs *regs, int nr);
#endif

#endif
