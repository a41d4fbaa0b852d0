/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Symbols in assembly. */
#ifndef _LINKAGE_H
#define _LINKAGE_H

#include <asm/linkage.h>

#ifdef __ASSEMBLY__
#define SYM_FUNC_START(name) .globl name; __ALIGN; name:
#define SYM_FUNC_START_LOCAL(name) __ALIGN; name:
#define SYM_FUNC_END(name) .type name, @function; .size name, .-name
#define SYM_INNER_LABEL(name) .globl name; .type name, @notype; name:
#endif

#endif
