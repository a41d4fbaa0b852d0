// SPDX-License-Identifier: GPL-2.0-or-later
// Where a module's sections go: text and data, and those of init apart as they are freed early.
#define pr_fmt(fmt) "module: " fmt
#include "errno.h"
#include "host_abi.h"
#include "mm.h"
#include "moduleloader.h"
#include "printk.h"
#include "string.h"

#define MODULE_MAX_SIZE (4UL << 20)

static bool is_text(enum mod_mem_type type)
{
	return type == MOD_TEXT || type == MOD_INIT_TEXT;
}

enum mod_mem_type section_mem_type(const struct load_info *info, const Elf_Shdr *shdr)
{
	bool init = !strncmp(info->secstrings + shdr->sh_name, ".init", 5);

	if (shdr->sh_flags & SHF_EXECINSTR)
		return init ? MOD_INIT_TEXT : MOD_TEXT;
	return init ? MOD_INIT_DATA : MOD_DATA;
}

/* Leaves each section's offset in its memory in sh_addr. */
int layout_sections(struct module *mod, struct load_info *info)
{
	u32 i;

	for (i = 0; i < info->hdr->e_shnum; i++) {
		Elf_Shdr *shdr = &info->sechdrs[i];
		struct module_memory *mem = &mod->mem[section_mem_type(info, shdr)];
		unsigned long align = max_t(unsigned long, shdr->sh_addralign, 1);

		if (!(shdr->sh_flags & SHF_ALLOC))
			continue;
		mem->size = ALIGN(mem->size, align);
		shdr->sh_addr = mem->size;
		if (shdr->sh_size > MODULE_MAX_SIZE || mem->size + shdr->sh_size > MODULE_MAX_SIZE) {
			pr_err("%s: section %s is too large\n", mod->name, info->secstrings + shdr->sh_name);
			return -ENOMEM;
		}
		mem->size += shdr->sh_size;
	}
	return 0;
}

static int alloc_memory(struct module_memory *mem, bool text)
{
	long base = host_hypercall(HYPERCALL_MODULE, MODULE_OP_ALLOC, 0, mem->size, text);

	if (IS_ERR_VALUE(base))
		return (int)base;
	mem->base = mem->writable = (char *)base;
	if (text) {
		mem->writable = kzalloc(mem->size, GFP_KERNEL);
		if (!mem->writable)
			return -ENOMEM;
	}
	return 0;
}

int alloc_module_memory(struct module *mod)
{
	enum mod_mem_type type;
	int err;

	for (type = 0; type < MOD_MEM_NUM_TYPES; type++) {
		if (!mod->mem[type].size)
			continue;
		err = alloc_memory(&mod->mem[type], is_text(type));
		if (err) {
			pr_err("%s: no memory for %lu bytes\n", mod->name, mod->mem[type].size);
			return err;
		}
	}
	return 0;
}

/* Copies the sections; their sh_addr is the place where they run from now on. */
void move_module(struct module *mod, struct load_info *info)
{
	u32 i;

	for (i = 0; i < info->hdr->e_shnum; i++) {
		Elf_Shdr *shdr = &info->sechdrs[i];
		struct module_memory *mem = &mod->mem[section_mem_type(info, shdr)];

		if (!(shdr->sh_flags & SHF_ALLOC)) {
			shdr->sh_addr = 0;
			continue;
		}
		if (shdr->sh_type == SHT_NOBITS)
			memset(mem->writable + shdr->sh_addr, 0, shdr->sh_size);
		else
			memcpy(mem->writable + shdr->sh_addr, (char *)info->hdr + shdr->sh_offset,
			       shdr->sh_size);
		shdr->sh_addr += (unsigned long)mem->base;
	}
}

/* Text is written by the host alone. */
int place_module_text(struct module *mod)
{
	enum mod_mem_type type;
	long err;

	for (type = 0; type < MOD_MEM_NUM_TYPES; type++) {
		struct module_memory *mem = &mod->mem[type];

		if (!is_text(type) || !mem->size)
			continue;
		err = host_hypercall(HYPERCALL_MODULE, MODULE_OP_PLACE, 0, (unsigned long)mem->base,
				     (unsigned long)mem->writable);
		kfree(mem->writable);
		mem->writable = NULL;
		if (err)
			return (int)err;
	}
	return 0;
}

void free_module_memory(struct module *mod, enum mod_mem_type type)
{
	struct module_memory mem = mod->mem[type];

	if (is_text(type) && mem.writable != mem.base)
		kfree(mem.writable);
	mod->mem[type] = (struct module_memory){ NULL, NULL, 0 };
	if (mem.base)
		host_hypercall(HYPERCALL_MODULE, MODULE_OP_FREE, 0, (unsigned long)mem.base, 0);
}

bool within_module_mem_type(unsigned long addr, const struct module *mod, enum mod_mem_type type)
{
	const struct module_memory *mem = &mod->mem[type];

	return addr - (unsigned long)mem->base < mem->size;
}

/* Where to write what will be seen at addr. */
char *module_writable_address(struct module *mod, unsigned long addr)
{
	enum mod_mem_type type;

	for (type = 0; type < MOD_MEM_NUM_TYPES; type++)
		if (within_module_mem_type(addr, mod, type))
			return mod->mem[type].writable + (addr - (unsigned long)mod->mem[type].base);
	return NULL;
}
