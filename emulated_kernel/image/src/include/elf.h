/* SPDX-License-Identifier: GPL-2.0-or-later */
/* ELF as far as relocatable modules need it; Elf_* is the width of the architecture. */
#ifndef _ELF_H
#define _ELF_H

#include "types.h"
#include <asm/elf.h>

#define EI_CLASS 4
#define EI_DATA 5
#define EI_NIDENT 16
#define ELFCLASS32 1
#define ELFCLASS64 2
#define ELFDATA2LSB 1
#define ELFMAG "\177ELF"
#define SELFMAG 4
#define ET_REL 1

#define SHN_UNDEF 0
#define SHN_LORESERVE 0xff00
#define SHN_ABS 0xfff1
#define SHN_COMMON 0xfff2
#define SHT_NULL 0
#define SHT_SYMTAB 2
#define SHT_RELA 4
#define SHT_NOBITS 8
#define SHT_REL 9
#define SHF_WRITE 1
#define SHF_ALLOC 2
#define SHF_EXECINSTR 4
#define STB_LOCAL 0
#define STB_WEAK 2
#define STT_OBJECT 1

#define ELF_ST_BIND(info) ((info) >> 4)
#define ELF_ST_TYPE(info) ((info) & 15)

typedef struct {
	u8 e_ident[EI_NIDENT];
	u16 e_type, e_machine;
	u32 e_version;
	u64 e_entry, e_phoff, e_shoff;
	u32 e_flags;
	u16 e_ehsize, e_phentsize, e_phnum, e_shentsize, e_shnum, e_shstrndx;
} Elf64_Ehdr;

typedef struct {
	u32 sh_name, sh_type;
	u64 sh_flags, sh_addr, sh_offset, sh_size;
	u32 sh_link, sh_info;
	u64 sh_addralign, sh_entsize;
} Elf64_Shdr;

typedef struct {
	u32 st_name;
	u8 st_info, st_other;
	u16 st_shndx;
	u64 st_value, st_size;
} Elf64_Sym;

typedef struct {
	u64 r_offset, r_info;
	s64 r_addend;
} Elf64_Rela;

typedef struct {
	u8 e_ident[EI_NIDENT];
	u16 e_type, e_machine;
	u32 e_version, e_entry, e_phoff, e_shoff, e_flags;
	u16 e_ehsize, e_phentsize, e_phnum, e_shentsize, e_shnum, e_shstrndx;
} Elf32_Ehdr;

typedef struct {
	u32 sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size;
	u32 sh_link, sh_info, sh_addralign, sh_entsize;
} Elf32_Shdr;

typedef struct {
	u32 st_name, st_value, st_size;
	u8 st_info, st_other;
	u16 st_shndx;
} Elf32_Sym;

typedef struct {
	u32 r_offset, r_info;
} Elf32_Rel;

#if __SIZEOF_POINTER__ == 8
#define ELF_CLASS ELFCLASS64
#define ELF_R_SYM(info) ((u32)((info) >> 32))
#define ELF_R_TYPE(info) ((u32)(info))
typedef Elf64_Ehdr Elf_Ehdr;
typedef Elf64_Shdr Elf_Shdr;
typedef Elf64_Sym Elf_Sym;
typedef Elf64_Rela Elf_Rela;
#else
#define ELF_CLASS ELFCLASS32
#define ELF_R_SYM(info) ((info) >> 8)
#define ELF_R_TYPE(info) ((info) & 0xff)
typedef Elf32_Ehdr Elf_Ehdr;
typedef Elf32_Shdr Elf_Shdr;
typedef Elf32_Sym Elf_Sym;
typedef Elf32_Rel Elf_Rel;
#endif

#endif
