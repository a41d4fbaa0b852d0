/* SPDX-License-Identifier: GPL-2.0-or-later */
/* BUG() and WARN(): a trapping instruction and an entry in the bug table. */
#ifndef _BUG_H
#define _BUG_H

#include "types.h"
#include <asm/bug.h>

#define BUGFLAG_WARNING 1
#define BUGFLAG_ONCE 2
#define BUGFLAG_DONE 4

struct bug_entry {
	s32 bug_addr_disp; /* relative to the field itself */
	s32 file_disp;     /* relative to the field itself */
	u16 line;
	u16 flags;
};

enum bug_trap_type {
	BUG_TRAP_TYPE_NONE = 0,
	BUG_TRAP_TYPE_WARN = 1,
	BUG_TRAP_TYPE_BUG = 2,
};

struct pt_regs;
enum bug_trap_type report_bug(unsigned long bugaddr, struct pt_regs *regs);
struct bug_entry *find_bug(unsigned long bugaddr);

#define BUG() do { BUG_INSN(0); unreachable(); } while (0)
#define BUG_ON(cond) do { if (unlikely(cond)) BUG(); } while (0)
#define WARN_ON(cond) ({                                                   \
	bool _w = !!(cond);                                                \
	if (unlikely(_w))                                                  \
		BUG_INSN(BUGFLAG_WARNING);                                 \
	unlikely(_w); })
#define WARN_ON_ONCE(cond) ({                                              \
	bool _w = !!(cond);                                                \
	if (unlikely(_w))                                                  \
		BUG_INSN(BUGFLAG_WARNING | BUGFLAG_ONCE);                  \
	unlikely(_w); })

#endif
