/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Branches that are a nop in the text until the host makes them a jump. */
#ifndef _JUMP_LABEL_H
#define _JUMP_LABEL_H

#include "types.h"

/* Stands for its branches in the jump table; whether they are jumps is seen in the text alone. */
struct static_key {
	atomic_t enabled;
};

#include <asm/jump_label.h>

#define static_branch_unlikely(key) arch_static_branch(key)

#endif
