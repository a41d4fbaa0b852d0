// SPDX-License-Identifier: GPL-2.0-or-later
// Whether a file is a module for this machine, with nothing that points outside of it.
#define pr_fmt(fmt) "module: " fmt
#include "errno.h"
#include "mm.h"
#include "moduleloader.h"
#include "printk.h"
#include "string.h"

static int check_header(const struct load_info *info)
{
	const Elf_Ehdr *hdr = info->hdr;

	if (info->len < SELFMAG || memcmp(hdr->e_ident, ELFMAG, SELFMAG)) {
		pr_err("not an ELF file\n");
		return -ENOEXEC;
	}
	if (info->len < sizeof(*hdr)) {
		pr_err("truncated: the ELF header has %zu bytes, the file %lu\n", sizeof(*hdr), info->len);
		return -ENOEXEC;
	}
	if (hdr->e_ident[EI_CLASS] != ELF_CLASS || hdr->e_ident[EI_DATA] != ELFDATA2LSB) {
		pr_err("ELF class %u, data encoding %u: not of this machine\n", hdr->e_ident[EI_CLASS],
		       hdr->e_ident[EI_DATA]);
		return -ENOEXEC;
	}
	if (hdr->e_type != ET_REL) {
		pr_err("ELF type %u is not relocatable\n", hdr->e_type);
		return -ENOEXEC;
	}
	if (hdr->e_machine != ELF_ARCH) {
		pr_err("ELF machine %u, not %u\n", hdr->e_machine, ELF_ARCH);
		return -ENOEXEC;
	}
	return 0;
}

static bool is_in_file(const struct load_info *info, u64 offset, u64 size)
{
	return offset <= info->len && size <= info->len - offset;
}

static int check_section_table(struct load_info *info)
{
	const Elf_Ehdr *hdr = info->hdr;
	unsigned long size = (unsigned long)hdr->e_shnum * sizeof(Elf_Shdr);

	if (hdr->e_shentsize != sizeof(Elf_Shdr) || !hdr->e_shnum) {
		pr_err("no section headers\n");
		return -ENOEXEC;
	}
	if (!is_in_file(info, hdr->e_shoff, size) || hdr->e_shoff % sizeof(long)) {
		pr_err("truncated: section headers up to %#llx, the file has %#lx bytes\n",
		       (u64)hdr->e_shoff + size, info->len);
		return -ENOEXEC;
	}
	info->sechdrs = (Elf_Shdr *)((char *)hdr + hdr->e_shoff);
	if (hdr->e_shstrndx == SHN_UNDEF || hdr->e_shstrndx >= hdr->e_shnum) {
		pr_err("section %u, which should hold the section names, doesn't exist\n", hdr->e_shstrndx);
		return -ENOEXEC;
	}
	return 0;
}

/* Strings are read from it by offset alone: the last one has to end. */
static bool is_string_table(const struct load_info *info, const Elf_Shdr *shdr)
{
	const char *text = (const char *)info->hdr + shdr->sh_offset;

	return shdr->sh_type != SHT_NOBITS && shdr->sh_size && !text[shdr->sh_size - 1];
}

static int check_section(const struct load_info *info, u32 index)
{
	const Elf_Shdr *shdr = &info->sechdrs[index];

	if (shdr->sh_type == SHT_NULL)
		return 0;
	if (shdr->sh_type != SHT_NOBITS && !is_in_file(info, shdr->sh_offset, shdr->sh_size)) {
		pr_err("truncated: section %u ends at %#llx, the file has %#lx bytes\n", index,
		       (u64)shdr->sh_offset + shdr->sh_size, info->len);
		return -ENOEXEC;
	}
	if (shdr->sh_addralign > PAGE_SIZE || shdr->sh_addralign & (shdr->sh_addralign - 1)) {
		pr_err("section %u wants alignment %#llx\n", index, (u64)shdr->sh_addralign);
		return -ENOEXEC;
	}
	return 0;
}

static int check_sections(struct load_info *info)
{
	const Elf_Shdr *names = &info->sechdrs[info->hdr->e_shstrndx];
	u32 i;

	for (i = 0; i < info->hdr->e_shnum; i++)
		if (check_section(info, i))
			return -ENOEXEC;
	if (!is_string_table(info, names)) {
		pr_err("the section names aren't strings\n");
		return -ENOEXEC;
	}
	info->secstrings = (const char *)info->hdr + names->sh_offset;
	for (i = 0; i < info->hdr->e_shnum; i++) {
		if (info->sechdrs[i].sh_name >= names->sh_size) {
			pr_err("section %u has no name\n", i);
			return -ENOEXEC;
		}
	}
	return 0;
}

static int check_symbols(struct load_info *info)
{
	const Elf_Shdr *syms, *strs;
	u32 i;

	for (i = 1; i < info->hdr->e_shnum; i++)
		if (info->sechdrs[i].sh_type == SHT_SYMTAB)
			info->index.sym = i;
	if (!info->index.sym) {
		pr_err("no symbol table (stripped?)\n");
		return -ENOEXEC;
	}
	syms = &info->sechdrs[info->index.sym];
	info->index.str = syms->sh_link;
	if (syms->sh_link >= info->hdr->e_shnum || !is_string_table(info, &info->sechdrs[syms->sh_link]) ||
	    syms->sh_offset % sizeof(long)) {
		pr_err("no symbol names\n");
		return -ENOEXEC;
	}
	strs = &info->sechdrs[info->index.str];
	info->symtab = (Elf_Sym *)((char *)info->hdr + syms->sh_offset);
	info->num_syms = syms->sh_size / sizeof(Elf_Sym);
	info->strtab = (const char *)info->hdr + strs->sh_offset;
	for (i = 0; i < info->num_syms; i++) {
		if (info->symtab[i].st_name >= strs->sh_size) {
			pr_err("symbol %u has no name\n", i);
			return -ENOEXEC;
		}
	}
	return 0;
}

static int check_relocations(const struct load_info *info)
{
	u32 i;

	for (i = 1; i < info->hdr->e_shnum; i++) {
		const Elf_Shdr *shdr = &info->sechdrs[i];

		if (shdr->sh_type != SHT_REL && shdr->sh_type != SHT_RELA)
			continue;
		if (shdr->sh_info >= info->hdr->e_shnum || shdr->sh_offset % sizeof(long)) {
			pr_err("relocations %s belong to no section\n", info->secstrings + shdr->sh_name);
			return -ENOEXEC;
		}
		if (shdr->sh_type != ELF_RELOCATIONS) {
			pr_err("relocations %s are of the wrong kind\n", info->secstrings + shdr->sh_name);
			return -ENOEXEC;
		}
	}
	return 0;
}

int elf_validity_check(struct load_info *info)
{
	int err = check_header(info);

	err = err ?: check_section_table(info);
	err = err ?: check_sections(info);
	err = err ?: check_symbols(info);
	return err ?: check_relocations(info);
}

/* 0 if there is none. */
u32 find_sec(const struct load_info *info, const char *name)
{
	u32 i;

	for (i = 1; i < info->hdr->e_shnum; i++)
		if (!strcmp(info->secstrings + info->sechdrs[i].sh_name, name))
			return i;
	return 0;
}

/* The value of "tag=value" in the section of such strings. */
const char *get_modinfo(const struct load_info *info, const char *tag)
{
	const Elf_Shdr *shdr = &info->sechdrs[info->index.info];
	const char *p = (const char *)info->hdr + shdr->sh_offset, *end = p + shdr->sh_size;
	size_t len = strlen(tag);

	if (!info->index.info || !is_string_table(info, shdr))
		return NULL;
	for (; p < end; p += strlen(p) + 1)
		if (!strncmp(p, tag, len) && p[len] == '=')
			return p + len + 1;
	return NULL;
}
