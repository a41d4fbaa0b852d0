// SPDX-License-Identifier: GPL-2.0-or-later
// The exception table, and what counts as kernel text.
#include "entry.h"
#include "kallsyms.h"
#include "module.h"
#include "string.h"
#include "uaccess.h"

extern struct exception_table_entry __start___ex_table[], __stop___ex_table[];

static unsigned long ex_to_insn(const struct exception_table_entry *x)
{
	return (unsigned long)&x->insn + x->insn;
}

static int cmp_ex_search(const void *key, const void *elt)
{
	unsigned long addr = *(const unsigned long *)key, insn = ex_to_insn(elt);

	return addr < insn ? -1 : addr > insn;
}

/* The build has sorted the table by address. */
const struct exception_table_entry *search_exception_tables(unsigned long addr)
{
	const struct exception_table_entry *e;

	e = bsearch(&addr, __start___ex_table, __stop___ex_table - __start___ex_table,
		    sizeof(*__start___ex_table), cmp_ex_search);
	return e ?: search_module_extables(addr);
}

/* Sends a fault back to the place that the table names. */
int fixup_exception(struct pt_regs *regs)
{
	const struct exception_table_entry *e = search_exception_tables(instruction_pointer(regs));

	if (!e)
		return 0;
	instruction_pointer_set(regs, (unsigned long)&e->fixup + e->fixup);
	return 1;
}
NOKPROBE_SYMBOL(fixup_exception);

int core_kernel_text(unsigned long addr)
{
	return addr >= (unsigned long)_stext && addr < (unsigned long)_etext;
}

int kernel_text_address(unsigned long addr)
{
	return core_kernel_text(addr) || is_module_text_address(addr);
}
