// SPDX-License-Identifier: GPL-2.0-or-later
// The code around an instruction, for an oops report.
#include "entry.h"
#include "printk.h"
#include "sched.h"
#include "uaccess.h"

noinline void show_opcodes(struct pt_regs *regs)
{
	char text[3 * 64 + 8];
	u8 byte;
	int i, len = 0;

	for (i = -42; i < 22; i++) {
		if (copy_from_kernel_nofault(&byte, (u8 *)regs->ip + i, 1)) {
			printk(KERN_DEFAULT "Code: Unable to access opcode bytes at 0x%lx.\n",
			       regs->ip - 42);
			return;
		}
		len += scnprintf(text + len, sizeof(text) - len, i ? " %02x" : " <%02x>", byte);
	}
	printk(KERN_DEFAULT "Code:%s\n", text);
}
