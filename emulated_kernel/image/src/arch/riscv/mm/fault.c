// SPDX-License-Identifier: GPL-2.0-or-later
// Page faults: a fixup from the exception table, or an oops that says what was accessed.
#include "entry.h"
#include "printk.h"
#include "sched.h"

static noinline void die_kernel_fault(const char *msg, struct pt_regs *regs)
{
	pr_alert("Unable to handle kernel %s at virtual address %016lx\n", msg, regs->badaddr);
	die("Oops", regs, 0);
}
NOKPROBE_SYMBOL(die_kernel_fault);

static noinline void no_context(struct pt_regs *regs)
{
	if (fixup_exception(regs))
		return;
	if (regs->badaddr < PAGE_SIZE)
		die_kernel_fault("NULL pointer dereference", regs);
	die_kernel_fault("paging request", regs);
}
NOKPROBE_SYMBOL(no_context);

noinstr void do_page_fault(struct pt_regs *regs)
{
	no_context(regs);
}
