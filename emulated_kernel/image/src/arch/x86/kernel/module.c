// SPDX-License-Identifier: GPL-2.0-or-later
// Relocation of modules: x86_64 has the addend beside the place, i386 in it.
#include "errno.h"
#include "moduleloader.h"
#include "printk.h"
#include "string.h"

/* A place to relocate: where it is written, and the address that it will have. */
struct place {
	char *to;
	unsigned long addr;
	unsigned long left; /* bytes from there to the end of its section */
};

static int write_word(const struct place *place, u64 value, size_t size)
{
	if (place->left < size)
		return -ENOEXEC;
	memcpy(place->to, &value, size);
	return 0;
}

#ifdef __x86_64__
typedef Elf_Rela elf_relocation;

static int relocate(const struct place *place, const elf_relocation *rel, unsigned long symbol)
{
	u64 value = symbol + rel->r_addend;

	switch (ELF_R_TYPE(rel->r_info)) {
	case R_X86_64_NONE:
		return 0;
	case R_X86_64_64:
		return write_word(place, value, 8);
	case R_X86_64_32:
		return value == (u32)value ? write_word(place, value, 4) : -ERANGE;
	case R_X86_64_32S:
		return (s64)value == (s32)value ? write_word(place, value, 4) : -ERANGE;
	case R_X86_64_PC32:
	case R_X86_64_PLT32:
		value -= place->addr;
		return (s64)value == (s32)value ? write_word(place, value, 4) : -ERANGE;
	case R_X86_64_PC64:
		return write_word(place, value - place->addr, 8);
	}
	return -ENOEXEC;
}
#else
typedef Elf_Rel elf_relocation;

static int relocate(const struct place *place, const elf_relocation *rel, unsigned long symbol)
{
	u32 addend;

	if (place->left < sizeof(addend))
		return -ENOEXEC;
	memcpy(&addend, place->to, sizeof(addend));
	switch (ELF_R_TYPE(rel->r_info)) {
	case R_386_NONE:
		return 0;
	case R_386_32:
		return write_word(place, addend + symbol, 4);
	case R_386_PC32:
	case R_386_PLT32:
		return write_word(place, addend + symbol - place->addr, 4);
	}
	return -ENOEXEC;
}
#endif

int apply_relocations_of(struct module *mod, const struct load_info *info, u32 relsec)
{
	const Elf_Shdr *shdr = &info->sechdrs[relsec], *target = &info->sechdrs[shdr->sh_info];
	const elf_relocation *rel = (const elf_relocation *)((char *)info->hdr + shdr->sh_offset);
	char *base = module_writable_address(mod, target->sh_addr);
	unsigned long i;
	int err = 0;

	for (i = 0; i < shdr->sh_size / sizeof(*rel) && !err; i++, rel++) {
		u32 symbol = ELF_R_SYM(rel->r_info);
		struct place place = { base + rel->r_offset, target->sh_addr + rel->r_offset,
				       target->sh_size - rel->r_offset };

		if (!base || symbol >= info->num_syms || rel->r_offset >= target->sh_size)
			err = -ENOEXEC;
		else
			err = relocate(&place, rel, info->symtab[symbol].st_value);
		if (err)
			pr_err("%s: relocation %lu of %s, type %u, symbol %u: %s\n", mod->name, i,
			       info->secstrings + shdr->sh_name, (u32)ELF_R_TYPE(rel->r_info), symbol,
			       err == -ERANGE ? "too far away" : "not possible");
	}
	return err ? -ENOEXEC : 0;
}
