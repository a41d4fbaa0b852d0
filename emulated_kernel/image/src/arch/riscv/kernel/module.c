// SPDX-License-Identifier: GPL-2.0-or-later
// Relocation of modules: addresses are built by pairs of instructions, differences by pairs of relocations.
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

/* The low twelve bits are signed; this is what makes up for them. */
static s64 hi20(s64 offset)
{
	return (offset + 0x800) & ~0xfffLL;
}

static bool fits(s64 value, int bits)
{
	return value >= -(1LL << (bits - 1)) && value < 1LL << (bits - 1);
}

static u64 read_word(const struct place *place, size_t size)
{
	u64 value = 0;

	memcpy(&value, place->to, size);
	return value;
}

static int write_word(const struct place *place, u64 value, size_t size)
{
	memcpy(place->to, &value, size);
	return 0;
}

/* Sets the bits of an instruction that mask has. */
static int write_insn(const struct place *place, u32 mask, u32 bits)
{
	return write_word(place, (read_word(place, 4) & ~mask) | (bits & mask), 4);
}

static int relocate_u(const struct place *place, s64 offset)
{
	return fits(offset + 0x800, 32) ? write_insn(place, 0xfffff000, (u32)hi20(offset)) : -ERANGE;
}

static int relocate_i(const struct place *place, s64 offset)
{
	return write_insn(place, 0xfff00000, (u32)(offset - hi20(offset)) << 20);
}

static int relocate_s(const struct place *place, s64 offset)
{
	u32 low = (u32)(offset - hi20(offset));

	return write_insn(place, 0xfe000f80, (low & 0xfe0) << 20 | (low & 0x1f) << 7);
}

static int relocate_branch(const struct place *place, s64 offset)
{
	u32 o = (u32)offset;

	if (!fits(offset, 13))
		return -ERANGE;
	return write_insn(place, 0xfe000f80, (o & 0x1000) << 19 | (o & 0x7e0) << 20 |
						     (o & 0x1e) << 7 | (o & 0x800) >> 4);
}

static int relocate_jal(const struct place *place, s64 offset)
{
	u32 o = (u32)offset;

	if (!fits(offset, 21))
		return -ERANGE;
	return write_insn(place, 0xfffff000, (o & 0x100000) << 11 | (o & 0x7fe) << 20 |
						     (o & 0x800) << 9 | (o & 0xff000));
}

static int relocate_call(const struct place *place, s64 offset)
{
	const struct place second = { place->to + 4, place->addr + 4, place->left - 4 };

	if (place->left < 8)
		return -ENOEXEC;
	return relocate_u(place, offset) ?: relocate_i(&second, offset);
}

static int relocate_rvc_branch(const struct place *place, s64 offset)
{
	u32 o = (u32)offset;

	if (!fits(offset, 9))
		return -ERANGE;
	return write_word(place, (read_word(place, 2) & ~0x1c7cULL) | (o & 0x100) << 4 |
					 (o & 0x18) << 7 | (o & 0xc0) >> 1 | (o & 0x6) << 2 |
					 (o & 0x20) >> 3, 2);
}

static int relocate_rvc_jump(const struct place *place, s64 offset)
{
	u32 o = (u32)offset;

	if (!fits(offset, 12))
		return -ERANGE;
	return write_word(place, (read_word(place, 2) & ~0x1ffcULL) | (o & 0x800) << 1 |
					 (o & 0x10) << 7 | (o & 0x300) << 1 | (o & 0x400) >> 2 |
					 (o & 0x40) << 1 | (o & 0x80) >> 1 | (o & 0xe) << 2 |
					 (o & 0x20) >> 3, 2);
}

static int size_of(u32 type)
{
	switch (type) {
	case R_RISCV_NONE:
		return 0;
	case R_RISCV_64:
	case R_RISCV_ADD64:
	case R_RISCV_SUB64:
		return 8;
	case R_RISCV_ADD16:
	case R_RISCV_SUB16:
	case R_RISCV_RVC_BRANCH:
	case R_RISCV_RVC_JUMP:
		return 2;
	default:
		return 4;
	}
}

static int relocate_data(const struct place *place, u32 type, u64 value)
{
	int size = size_of(type);

	switch (type) {
	case R_RISCV_64:
		return write_word(place, value, 8);
	case R_RISCV_32:
		return value == (u32)value ? write_word(place, value, 4) : -ERANGE;
	case R_RISCV_32_PCREL:
		value -= place->addr;
		return fits((s64)value, 32) ? write_word(place, value, 4) : -ERANGE;
	case R_RISCV_ADD16:
	case R_RISCV_ADD32:
	case R_RISCV_ADD64:
		return write_word(place, read_word(place, size) + value, size);
	case R_RISCV_SUB16:
	case R_RISCV_SUB32:
	case R_RISCV_SUB64:
		return write_word(place, read_word(place, size) - value, size);
	}
	return -ENOEXEC;
}

static int relocate_insn(const struct place *place, u32 type, u64 value)
{
	s64 offset = (s64)(value - place->addr);

	switch (type) {
	case R_RISCV_BRANCH:
		return relocate_branch(place, offset);
	case R_RISCV_JAL:
		return relocate_jal(place, offset);
	case R_RISCV_CALL:
	case R_RISCV_CALL_PLT:
		return relocate_call(place, offset);
	case R_RISCV_PCREL_HI20:
		return relocate_u(place, offset);
	case R_RISCV_LO12_I:
		return fits((s64)value, 12) ? relocate_i(place, (s64)value) : -ERANGE;
	case R_RISCV_LO12_S:
		return fits((s64)value, 12) ? relocate_s(place, (s64)value) : -ERANGE;
	case R_RISCV_RVC_BRANCH:
		return relocate_rvc_branch(place, offset);
	case R_RISCV_RVC_JUMP:
		return relocate_rvc_jump(place, offset);
	}
	return relocate_data(place, type, value);
}

/* A relocation section, and what it applies to. */
struct section {
	const Elf_Rela *rel;
	unsigned long num, addr;
	const struct load_info *info;
};

/* The low half of an address names the instruction that has the upper one. */
static int relocate_pcrel_lo12(const struct place *place, u32 type, unsigned long auipc,
			       const struct section *section)
{
	unsigned long i;

	for (i = 0; i < section->num; i++) {
		const Elf_Rela *rel = &section->rel[i];
		s64 offset;

		if (section->addr + rel->r_offset != auipc || ELF_R_TYPE(rel->r_info) != R_RISCV_PCREL_HI20)
			continue;
		if (ELF_R_SYM(rel->r_info) >= section->info->num_syms)
			return -ENOEXEC;
		offset = section->info->symtab[ELF_R_SYM(rel->r_info)].st_value + rel->r_addend - auipc;
		return type == R_RISCV_PCREL_LO12_S ? relocate_s(place, offset) : relocate_i(place, offset);
	}
	return -ENOEXEC;
}

static int relocate(const struct place *place, const Elf_Rela *rel, const struct section *section)
{
	u32 type = ELF_R_TYPE(rel->r_info);
	u64 value = section->info->symtab[ELF_R_SYM(rel->r_info)].st_value;

	if (type == R_RISCV_NONE)
		return 0;
	if (place->left < (unsigned long)size_of(type))
		return -ENOEXEC;
	if (type == R_RISCV_PCREL_LO12_I || type == R_RISCV_PCREL_LO12_S)
		return relocate_pcrel_lo12(place, type, value, section);
	return relocate_insn(place, type, value + rel->r_addend);
}

int apply_relocations_of(struct module *mod, const struct load_info *info, u32 relsec)
{
	const Elf_Shdr *shdr = &info->sechdrs[relsec], *target = &info->sechdrs[shdr->sh_info];
	const Elf_Rela *rel = (const Elf_Rela *)((char *)info->hdr + shdr->sh_offset);
	const struct section section = { rel, shdr->sh_size / sizeof(*rel), target->sh_addr, info };
	char *base = module_writable_address(mod, target->sh_addr);
	unsigned long i;
	int err = 0;

	for (i = 0; i < section.num && !err; i++, rel++) {
		u32 symbol = ELF_R_SYM(rel->r_info);
		struct place place = { base + rel->r_offset, target->sh_addr + rel->r_offset,
				       target->sh_size - rel->r_offset };

		if (!base || symbol >= info->num_syms || rel->r_offset >= target->sh_size)
			err = -ENOEXEC;
		else
			err = relocate(&place, rel, &section);
		if (err)
			pr_err("%s: relocation %lu of %s, type %u, symbol %u: %s\n", mod->name, i,
			       info->secstrings + shdr->sh_name, (u32)ELF_R_TYPE(rel->r_info), symbol,
			       err == -ERANGE ? "too far away" : "not possible");
	}
	return err ? -ENOEXEC : 0;
}
