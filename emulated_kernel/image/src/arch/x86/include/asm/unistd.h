/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Linux's system call numbers of this machine, for the calls that this kernel has. */
#ifndef _ASM_UNISTD_H
#define _ASM_UNISTD_H

#ifdef CONFIG_X86_32
#include <asm/unistd_32.h>
#else
#include <asm/unistd_64.h>
#endif

#endif
