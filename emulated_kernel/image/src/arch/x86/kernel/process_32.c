// SPDX-License-Identifier: GPL-2.0-or-later
// The registers of i386 in an oops report.
#include "entry.h"
#include "printk.h"
#include "sched.h"

noinline void __show_regs(struct pt_regs *regs)
{
	printk(KERN_DEFAULT "EIP: %pS\n", (void *)regs->ip);
	show_opcodes(regs);
	printk(KERN_DEFAULT "EAX: %08lx EBX: %08lx ECX: %08lx EDX: %08lx\n", regs->ax, regs->bx,
	       regs->cx, regs->dx);
	printk(KERN_DEFAULT "ESI: %08lx EDI: %08lx EBP: %08lx ESP: %08lx\n", regs->si, regs->di,
	       regs->bp, regs->sp);
	printk(KERN_DEFAULT "DS: %04lx ES: %04lx FS: %04lx GS: %04lx SS: %04lx EFLAGS: %08lx\n",
	       regs->ds, regs->es, regs->fs, regs->gs, regs->ss, regs->flags);
}
