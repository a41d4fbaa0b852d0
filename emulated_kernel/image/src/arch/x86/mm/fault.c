// SPDX-License-Identifier: GPL-2.0-or-later
// Page faults: a fixup from the exception table, or an oops that says what was accessed.
#include "entry.h"
#include "host_abi.h"
#include "printk.h"
#include "sched.h"
#include "tracepoint.h"

#define X86_PF_PROT 1
#define X86_PF_WRITE 2
#define X86_PF_USER 4
#define X86_PF_RSVD 8
#define X86_PF_INSTR 16

DECLARE_PER_CPU(unsigned long, host_cr2);

static const char *fault_access(unsigned long error_code)
{
	if (error_code & X86_PF_INSTR)
		return "instruction fetch";
	return error_code & X86_PF_WRITE ? "write access" : "read access";
}

static const char *fault_reason(unsigned long error_code)
{
	if (!(error_code & X86_PF_PROT))
		return "not-present page";
	return error_code & X86_PF_RSVD ? "reserved bit violation" : "permissions violation";
}

static noinline void show_fault_oops(unsigned long error_code, unsigned long address)
{
	if (address < PAGE_SIZE)
		pr_alert("BUG: kernel NULL pointer dereference, address: %px\n", (void *)address);
	else
		pr_alert("BUG: unable to handle page fault for address: %px\n", (void *)address);
	pr_alert("#PF: supervisor %s in kernel mode\n", fault_access(error_code));
	pr_alert("#PF: error_code(0x%04lx) - %s\n", error_code, fault_reason(error_code));
}

static noinline void page_fault_oops(struct pt_regs *regs, unsigned long error_code,
				     unsigned long address)
{
	show_fault_oops(error_code, address);
	die("Oops", regs, error_code);
}
NOKPROBE_SYMBOL(page_fault_oops);

static noinline void kernelmode_fixup_or_oops(struct pt_regs *regs, unsigned long error_code,
					      unsigned long address)
{
	if (fixup_exception(regs))
		return;
	page_fault_oops(regs, error_code, address);
}
NOKPROBE_SYMBOL(kernelmode_fixup_or_oops);

noinstr void exc_page_fault(struct pt_regs *regs, unsigned long error_code)
{
	unsigned long address = this_cpu_read(host_cr2);

	/* No user mode has pages that could be missing. */
	trace_page_fault_kernel(address, regs, error_code);
	kernelmode_fixup_or_oops(regs, error_code, address);
}
