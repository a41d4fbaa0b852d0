/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What an ELF file for this architecture is called, and its relocations. */
#ifndef _ASM_ELF_H
#define _ASM_ELF_H

#ifdef __x86_64__
#define ELF_ARCH 62
#define ELF_RELOCATIONS SHT_RELA
#define R_X86_64_NONE 0
#define R_X86_64_64 1
#define R_X86_64_PC32 2
#define R_X86_64_PLT32 4
#define R_X86_64_32 10
#define R_X86_64_32S 11
#define R_X86_64_PC64 24
#else
#define ELF_ARCH 3
#define ELF_RELOCATIONS SHT_REL
#define R_386_NONE 0
#define R_386_32 1
#define R_386_PC32 2
#define R_386_PLT32 4
#endif

#endif
