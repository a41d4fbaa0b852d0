/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Symbols in assembly. */
#ifndef _LINKAGE_H
#define _LINKAGE_H

#ifdef __ASSEMBLY__
#define SYM_FUNC_START(name) .globl name; .p2align 4, 0x90; name:
#define SYM_FUNC_START_LOCAL(name) .p2align 4, 0x90; name:
#define SYM_FUNC_END(name) .type name, @function; .size name, .-name
#define SYM_INNER_LABEL(name) .globl name; .type name, @notype; name:
#define NOKPROBE(name) .pushsection _kprobe_blacklist, "aw"; .balign 8; .quad name; .popsection
#endif

#endif
