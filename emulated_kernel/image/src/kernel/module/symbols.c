// SPDX-License-Identifier: GPL-2.0-or-later
// Symbols between modules and the kernel: found, counted as uses, and refused when they clash.
#include "errno.h"
#include "moduleloader.h"
#include "kallsyms.h"
#include "mm.h"
#include "printk.h"
#include "string.h"

static const struct kernel_symbol *find_exported(const struct module *mod, const char *name)
{
	unsigned long i;

	for (i = 0; i < mod->num_syms; i++)
		if (!strcmp(mod->syms[i].name, name))
			return &mod->syms[i];
	return NULL;
}

static bool already_uses(struct module *a, struct module *b)
{
	struct module_use *use;

	list_for_each_entry(use, &b->source_list, source_list)
		if (use->source == a)
			return true;
	return false;
}

static int ref_module(struct module *a, struct module *b)
{
	struct module_use *use;

	if (already_uses(a, b))
		return 0;
	if (b->state == MODULE_STATE_COMING)
		return -EBUSY;
	if (!try_module_get(b))
		return -ENOENT;
	use = kmalloc(sizeof(*use), GFP_ATOMIC);
	if (!use) {
		module_put(b);
		return -ENOMEM;
	}
	use->source = a;
	use->target = b;
	list_add(&use->source_list, &b->source_list);
	list_add(&use->target_list, &a->target_list);
	return 0;
}

void module_unload_free(struct module *mod)
{
	struct module_use *use, *tmp;

	mutex_lock(&module_mutex);
	list_for_each_entry_safe(use, tmp, &mod->target_list, target_list) {
		module_put(use->target);
		list_del(&use->source_list);
		list_del(&use->target_list);
		kfree(use);
	}
	mutex_unlock(&module_mutex);
}

/* The kernel exports all its global symbols, a module what it says. */
static noinline int resolve_symbol(struct module *mod, const char *name, unsigned long *value)
{
	const struct kernel_symbol *ksym;
	struct module *owner;
	int err = -ENOENT;

	*value = kallsyms_lookup_exported(name);
	if (*value)
		return 0;
	mutex_lock(&module_mutex);
	list_for_each_entry(owner, &modules, list) {
		if (owner->state == MODULE_STATE_UNFORMED)
			continue;
		ksym = find_exported(owner, name);
		if (!ksym)
			continue;
		*value = ksym->value;
		err = ref_module(mod, owner);
		break;
	}
	mutex_unlock(&module_mutex);
	return err;
}

static int resolve_undefined(struct module *mod, Elf_Sym *sym, const char *name)
{
	unsigned long value;
	int err = resolve_symbol(mod, name, &value);

	if (err == -ENOENT && ELF_ST_BIND(sym->st_info) == STB_WEAK)
		return 0;
	if (err)
		pr_warn("%s: Unknown symbol %s (err %d)\n", mod->name, name, err);
	else
		sym->st_value = value;
	return err;
}

/* Makes each symbol's value the address it stands for. */
int simplify_symbols(struct module *mod, const struct load_info *info)
{
	int err = 0, one;
	u32 i;

	for (i = 1; i < info->num_syms; i++) {
		Elf_Sym *sym = &info->symtab[i];
		const char *name = info->strtab + sym->st_name;

		one = 0;
		if (sym->st_shndx == SHN_UNDEF) {
			one = resolve_undefined(mod, sym, name);
		} else if (sym->st_shndx < info->hdr->e_shnum) {
			sym->st_value += info->sechdrs[sym->st_shndx].sh_addr;
		} else if (sym->st_shndx != SHN_ABS) {
			pr_err("%s: symbol %s is in section %u, which isn't there\n", mod->name, name,
			       sym->st_shndx);
			one = -ENOEXEC;
		}
		err = one ?: err;
	}
	return err;
}

int verify_exported_symbols(struct module *mod)
{
	unsigned long i;
	struct module *owner;

	for (i = 0; i < mod->num_syms; i++) {
		const char *name = mod->syms[i].name;
		bool clash = kallsyms_lookup_exported(name) != 0;

		list_for_each_entry(owner, &modules, list)
			if (owner != mod && owner->state != MODULE_STATE_UNFORMED)
				clash |= find_exported(owner, name) != NULL;
		if (clash) {
			pr_err("%s: exports duplicate symbol %s\n", mod->name, name);
			return -ENOEXEC;
		}
	}
	return 0;
}
