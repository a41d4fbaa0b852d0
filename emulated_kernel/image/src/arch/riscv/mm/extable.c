// SPDX-License-Identifier: GPL-2.0-or-later
// Sends a fault back to the place that the exception table names.
#include "sched.h"
#include "uaccess.h"
#include <asm/entry.h>

int fixup_exception(struct pt_regs *regs)
{
	const struct exception_table_entry *e = search_exception_tables(regs->epc);

	if (!e)
		return 0;
	regs->epc = (unsigned long)&e->fixup + e->fixup;
	return 1;
}
NOKPROBE_SYMBOL(fixup_exception);
