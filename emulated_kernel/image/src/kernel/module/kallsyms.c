// SPDX-License-Identifier: GPL-2.0-or-later
// Symbols of loaded modules by name and by address.
#include "kallsyms.h"
#include "moduleloader.h"
#include "mm.h"
#include "printk.h"
#include "string.h"

/* As nm does. */
static char elf_type(const Elf_Sym *sym, const struct load_info *info)
{
	const Elf_Shdr *shdr = &info->sechdrs[sym->st_shndx];

	if (ELF_ST_BIND(sym->st_info) == STB_WEAK)
		return ELF_ST_TYPE(sym->st_info) == STT_OBJECT ? 'v' : 'w';
	if (sym->st_shndx == SHN_UNDEF)
		return 'U';
	if (sym->st_shndx >= info->hdr->e_shnum)
		return sym->st_shndx == SHN_ABS ? 'a' : '?';
	if (shdr->sh_flags & SHF_EXECINSTR)
		return 't';
	if (shdr->sh_type == SHT_NOBITS)
		return 'b';
	if (shdr->sh_flags & SHF_ALLOC)
		return shdr->sh_flags & SHF_WRITE ? 'd' : 'r';
	return '?';
}

/* What is left when init is over. */
static bool is_core_symbol(const Elf_Sym *sym, const struct load_info *info)
{
	const Elf_Shdr *shdr = &info->sechdrs[sym->st_shndx];
	enum mod_mem_type type;

	if (sym->st_shndx == SHN_UNDEF || sym->st_shndx >= info->hdr->e_shnum || !sym->st_name)
		return false;
	type = section_mem_type(info, shdr);
	return shdr->sh_flags & SHF_ALLOC && (type == MOD_TEXT || type == MOD_DATA);
}

/* Where code or data begins, as some assemblers tell; it names nothing. */
static bool is_mapping_symbol(const Elf_Sym *sym, const struct load_info *info)
{
	return info->strtab[sym->st_name] == '$';
}

static bool is_kept(u32 i, const struct load_info *info, bool core)
{
	if (is_mapping_symbol(&info->symtab[i], info))
		return false;
	return !core || i == 0 || is_core_symbol(&info->symtab[i], info);
}

/* In one piece of memory: the symbols, their letters, their names. */
struct mod_kallsyms *copy_kallsyms(const struct load_info *info, bool core)
{
	size_t names = 0;
	u32 i, n = 0;
	struct mod_kallsyms *k;
	char *s;

	for (i = 0; i < info->num_syms; i++) {
		if (is_kept(i, info, core)) {
			names += strlen(info->strtab + info->symtab[i].st_name) + 1;
			n++;
		}
	}
	k = kmalloc(sizeof(*k) + n * (sizeof(Elf_Sym) + 1) + names, GFP_KERNEL);
	if (!k)
		return NULL;
	k->symtab = (Elf_Sym *)(k + 1);
	k->typetab = (char *)(k->symtab + n);
	k->strtab = s = k->typetab + n;
	k->num_symtab = 0;
	for (i = 0; i < info->num_syms; i++) {
		if (!is_kept(i, info, core))
			continue;
		n = k->num_symtab++;
		k->symtab[n] = info->symtab[i];
		k->symtab[n].st_name = (u32)(s - k->strtab);
		k->typetab[n] = elf_type(&info->symtab[i], info);
		strcpy(s, info->strtab + info->symtab[i].st_name);
		s += strlen(s) + 1;
	}
	return k;
}

static const char *symbol_name(const struct mod_kallsyms *k, u32 i)
{
	return k->strtab + k->symtab[i].st_name;
}

static bool is_listed(const struct mod_kallsyms *k, u32 i)
{
	const char *name = symbol_name(k, i);

	return k->symtab[i].st_shndx != SHN_UNDEF && *name && strncmp(name, ".L", 2);
}

static unsigned long end_of_memory(unsigned long addr, struct module *mod)
{
	enum mod_mem_type type;

	for (type = 0; type < MOD_MEM_NUM_TYPES; type++)
		if (within_module_mem_type(addr, mod, type))
			return (unsigned long)mod->mem[type].base + mod->mem[type].size;
	return addr;
}

/* The first of those that begin at the nearest address below. */
static const char *find_kallsyms_symbol(struct module *mod, unsigned long addr, unsigned long *size,
					unsigned long *offset)
{
	const struct mod_kallsyms *k = mod->kallsyms;
	unsigned long next = end_of_memory(addr, mod), best_value = 0, value;
	u32 i, best = 0;

	for (i = 1; i < k->num_symtab; i++) {
		value = k->symtab[i].st_value;
		if (!is_listed(k, i))
			continue;
		if (value <= addr && value > best_value) {
			best = i;
			best_value = value;
		}
		if (value > addr && value < next)
			next = value;
	}
	if (!best)
		return NULL;
	if (size)
		*size = next - best_value;
	if (offset)
		*offset = addr - best_value;
	return symbol_name(k, best);
}

const char *module_address_lookup(unsigned long addr, unsigned long *size, unsigned long *offset,
				  char **modname, char *namebuf)
{
	struct module *mod = __module_address(addr);
	const char *name = mod ? find_kallsyms_symbol(mod, addr, size, offset) : NULL;

	if (!name)
		return NULL;
	if (modname)
		*modname = mod->name;
	strscpy(namebuf, name, KSYM_NAME_LEN);
	return namebuf;
}

static unsigned long find_symbol_value(const struct module *mod, const char *name)
{
	const struct mod_kallsyms *k = mod->kallsyms;
	u32 i;

	for (i = 1; i < k->num_symtab; i++)
		if (is_listed(k, i) && !strcmp(symbol_name(k, i), name))
			return k->symtab[i].st_value;
	return 0;
}

/* name can be MODULE:SYMBOL. */
unsigned long module_kallsyms_lookup_name(const char *name)
{
	const char *colon = strnchr(name, MODULE_NAME_LEN, ':');
	size_t len = colon ? (size_t)(colon - name) : 0;
	struct module *mod;
	unsigned long value;

	list_for_each_entry(mod, &modules, list) {
		if (mod->state == MODULE_STATE_UNFORMED)
			continue;
		if (colon && (strncmp(mod->name, name, len) || mod->name[len]))
			continue;
		value = find_symbol_value(mod, colon ? colon + 1 : name);
		if (value)
			return value;
	}
	return 0;
}
