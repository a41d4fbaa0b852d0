/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Where functions in assembly begin; what is in front of them is never executed. */
#ifndef _ASM_LINKAGE_H
#define _ASM_LINKAGE_H

#define __ALIGN .balign 4

#endif
