// SPDX-License-Identifier: GPL-2.0-or-later
// The bug tables of modules.
#include "bug.h"
#include "moduleloader.h"

void module_find_bug_table(struct module *mod, const struct load_info *info)
{
	u32 i = find_sec(info, "__bug_table");

	mod->bug_table = i ? (struct bug_entry *)info->sechdrs[i].sh_addr : NULL;
	mod->num_bugs = i ? info->sechdrs[i].sh_size / sizeof(struct bug_entry) : 0;
}

struct bug_entry *module_find_bug(unsigned long bugaddr)
{
	struct module *mod = __module_text_address(bugaddr);
	unsigned long i;

	for (i = 0; mod && i < mod->num_bugs; i++) {
		struct bug_entry *bug = &mod->bug_table[i];

		if ((unsigned long)&bug->bug_addr_disp + bug->bug_addr_disp == bugaddr)
			return bug;
	}
	return NULL;
}
NOKPROBE_SYMBOL(module_find_bug);
