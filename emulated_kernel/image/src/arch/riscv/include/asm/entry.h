/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Names that assembly and C share: symbols of entry.S, and addresses that stand for a program's. */
#ifndef _ASM_ENTRY_H
#define _ASM_ENTRY_H

#define ARCH_START_KERNEL riscv_start_kernel
#define FAKE_USER_IP 0x10000
#define FAKE_USER_SP 0x3fffffe000

#ifndef __ASSEMBLY__
struct pt_regs;

void handle_exception(void);
void do_trap_ecall_u(struct pt_regs *regs);
void do_page_fault(struct pt_regs *regs);
#endif

#endif
