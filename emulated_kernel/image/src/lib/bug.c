// SPDX-License-Identifier: GPL-2.0-or-later
// The bug table: from the address of a trapping instruction to BUG() or WARN().
#include "bug.h"
#include "kallsyms.h"
#include "module.h"
#include "printk.h"
#include "sched.h"

extern struct bug_entry __start___bug_table[], __stop___bug_table[];

static unsigned long bug_addr(const struct bug_entry *bug)
{
	return (unsigned long)&bug->bug_addr_disp + bug->bug_addr_disp;
}

static const char *bug_file(const struct bug_entry *bug)
{
	return (const char *)&bug->file_disp + bug->file_disp;
}

struct bug_entry *find_bug(unsigned long bugaddr)
{
	struct bug_entry *bug;

	for (bug = __start___bug_table; bug < __stop___bug_table; bug++)
		if (bug_addr(bug) == bugaddr)
			return bug;
	return module_find_bug(bugaddr);
}

static void __warn(struct bug_entry *bug, struct pt_regs *regs)
{
	pr_warn("------------[ cut here ]------------\n");
	pr_warn("WARNING: CPU: %d PID: %d at %s:%u %pS\n", smp_processor_id(), current->pid,
		bug_file(bug), bug->line, (void *)instruction_pointer(regs));
	show_regs(regs);
	pr_warn("---[ end trace 0000000000000000 ]---\n");
}

enum bug_trap_type report_bug(unsigned long bugaddr, struct pt_regs *regs)
{
	struct bug_entry *bug = kernel_text_address(bugaddr) ? find_bug(bugaddr) : NULL;

	if (!bug)
		return BUG_TRAP_TYPE_NONE;
	if (!(bug->flags & BUGFLAG_WARNING)) {
		printk(KERN_DEFAULT "------------[ cut here ]------------\n");
		pr_err("kernel BUG at %s:%u!\n", bug_file(bug), bug->line);
		return BUG_TRAP_TYPE_BUG;
	}
	if (bug->flags & BUGFLAG_ONCE) {
		if (bug->flags & BUGFLAG_DONE)
			return BUG_TRAP_TYPE_WARN;
		bug->flags |= BUGFLAG_DONE;
	}
	__warn(bug, regs);
	return BUG_TRAP_TYPE_WARN;
}
NOKPROBE_SYMBOL(report_bug);
