/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What the parts of the module loader share. */
#ifndef _MODULELOADER_H
#define _MODULELOADER_H

#include "elf.h"
#include "module.h"
#include "wait.h"

/* A module's file while it is taken apart; sections' sh_addr is where they are now. */
struct load_info {
	Elf_Ehdr *hdr;
	unsigned long len;
	Elf_Shdr *sechdrs;
	const char *secstrings;
	const char *strtab;
	Elf_Sym *symtab;
	u32 num_syms;
	const char *name;
	struct { u32 sym, str, mod, info; } index;
};

extern struct mutex module_mutex;

int elf_validity_check(struct load_info *info);
u32 find_sec(const struct load_info *info, const char *name);
const char *get_modinfo(const struct load_info *info, const char *tag);

enum mod_mem_type section_mem_type(const struct load_info *info, const Elf_Shdr *shdr);
int layout_sections(struct module *mod, struct load_info *info);
int alloc_module_memory(struct module *mod);
void move_module(struct module *mod, struct load_info *info);
int place_module_text(struct module *mod);
void free_module_memory(struct module *mod, enum mod_mem_type type);
char *module_writable_address(struct module *mod, unsigned long addr);

int simplify_symbols(struct module *mod, const struct load_info *info);
int verify_exported_symbols(struct module *mod);
void module_unload_free(struct module *mod);

void module_find_bug_table(struct module *mod, const struct load_info *info);
struct mod_kallsyms *copy_kallsyms(const struct load_info *info, bool core);

/* arch: relsec is a section of ELF_RELOCATIONS that belongs to a loaded section. */
int apply_relocations_of(struct module *mod, const struct load_info *info, u32 relsec);

#endif
