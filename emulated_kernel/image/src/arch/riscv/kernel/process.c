// SPDX-License-Identifier: GPL-2.0-or-later
// The architecture's share of switching between tasks; its registers in an oops report.
#include "entry.h"
#include "printk.h"
#include "sched.h"
#include <asm/asm.h>

BUILD_BUG_ON(sizeof(struct pt_regs) != PT_REGS_SIZE);
BUILD_BUG_ON(offsetof(struct pt_regs, ra) != PT_RA);
BUILD_BUG_ON(offsetof(struct pt_regs, t0) != PT_T0);
BUILD_BUG_ON(offsetof(struct pt_regs, a0) != PT_A0);
BUILD_BUG_ON(offsetof(struct pt_regs, t6) != 31 * SZREG);
BUILD_BUG_ON(offsetof(struct pt_regs, status) != PT_STATUS);
BUILD_BUG_ON(offsetof(struct pt_regs, badaddr) != PT_BADADDR);
BUILD_BUG_ON(offsetof(struct pt_regs, cause) != PT_CAUSE);
BUILD_BUG_ON(offsetof(struct pt_regs, orig_a0) != PT_ORIG_A0);
BUILD_BUG_ON(offsetof(struct task_struct, thread.sp) != 0);

BUILD_BUG_ON(sizeof(struct inactive_task_frame) != INACTIVE_FRAME_SIZE);

__visible __kprobes notrace struct task_struct *__switch_to(struct task_struct *prev,
							    struct task_struct *next)
{
	this_cpu_write(current_task, next);
	riscv_current_is_tp = next;
	return prev;
}

noinline void __show_regs(struct pt_regs *regs)
{
	printk(KERN_DEFAULT "epc : %pS\n", (void *)regs->epc);
	printk(KERN_DEFAULT " ra : %pS\n", (void *)regs->ra);
	printk(KERN_DEFAULT "epc : %016lx ra : %016lx sp : %016lx\n", regs->epc, regs->ra, regs->sp);
	printk(KERN_DEFAULT " gp : %016lx tp : %016lx t0 : %016lx\n", regs->gp, regs->tp, regs->t0);
	printk(KERN_DEFAULT " t1 : %016lx t2 : %016lx s0 : %016lx\n", regs->t1, regs->t2, regs->s0);
	printk(KERN_DEFAULT " s1 : %016lx a0 : %016lx a1 : %016lx\n", regs->s1, regs->a0, regs->a1);
	printk(KERN_DEFAULT " a2 : %016lx a3 : %016lx a4 : %016lx\n", regs->a2, regs->a3, regs->a4);
	printk(KERN_DEFAULT " a5 : %016lx a6 : %016lx a7 : %016lx\n", regs->a5, regs->a6, regs->a7);
	printk(KERN_DEFAULT " s2 : %016lx s3 : %016lx s4 : %016lx\n", regs->s2, regs->s3, regs->s4);
	printk(KERN_DEFAULT " s5 : %016lx s6 : %016lx s7 : %016lx\n", regs->s5, regs->s6, regs->s7);
	printk(KERN_DEFAULT " s8 : %016lx s9 : %016lx s10: %016lx\n", regs->s8, regs->s9, regs->s10);
	printk(KERN_DEFAULT " s11: %016lx t3 : %016lx t4 : %016lx\n", regs->s11, regs->t3, regs->t4);
	printk(KERN_DEFAULT " t5 : %016lx t6 : %016lx\n", regs->t5, regs->t6);
	printk(KERN_DEFAULT "status: %016lx badaddr: %016lx cause: %016lx\n", regs->status,
	       regs->badaddr, regs->cause);
}
