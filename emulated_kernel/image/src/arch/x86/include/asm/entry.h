/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Names that assembly and C share: symbols of entry_64.S or entry_32.S, and offsets they depend on. */
#ifndef _ASM_ENTRY_H
#define _ASM_ENTRY_H

#ifdef CONFIG_X86_32
#define PT_REGS_SIZE 68
#define PT_AX 24
#define PT_ORIG_AX 44
#define PT_IP 48
#define PT_CS 52
#define PT_FLAGS 56
#define PT_SP 60
#define PT_SS 64
#define HOST_FRAME_SIZE 16
#define FAKE_USER_IP 0x8048000
#define ARCH_START_KERNEL i386_start_kernel
#define FAKE_USER_SP 0xbffde000
#else
#define PT_REGS_SIZE 168
#define PT_AX 80
#define PT_ORIG_AX 120
#define PT_IP 128
#define PT_CS 136
#define PT_FLAGS 144
#define PT_SP 152
#define PT_SS 160
#define HOST_FRAME_SIZE 32
#define FAKE_USER_IP 0x401000
#define ARCH_START_KERNEL x86_64_start_kernel
#define FAKE_USER_SP 0x7ffffffde000
#endif

#ifndef __ASSEMBLY__
struct pt_regs;
extern char __entry_text_start[], __entry_text_end[];

void show_opcodes(struct pt_regs *regs);
void do_int80_syscall_32(struct pt_regs *regs);
void do_syscall_64(struct pt_regs *regs, int nr);
void exc_page_fault(struct pt_regs *regs, unsigned long error_code);
#endif

#endif
