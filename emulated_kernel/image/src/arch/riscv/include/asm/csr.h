/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Bits of the supervisor's control registers. */
#ifndef _ASM_CSR_H
#define _ASM_CSR_H

#define SR_SIE 0x2	/* interrupts enabled */
#define SR_SPIE 0x20	/* the same before the trap */
#define SR_SPP 0x100	/* the trap came from the kernel */
#define SR_SUM 0x40000	/* the kernel may access user memory */

#define CAUSE_IRQ_FLAG (1UL << 63)
#define EXC_INST_ILLEGAL 2
#define EXC_BREAKPOINT 3
#define EXC_LOAD_MISALIGNED 4
#define EXC_STORE_MISALIGNED 6
#define EXC_SYSCALL 8
#define EXC_INST_PAGE_FAULT 12
#define EXC_LOAD_PAGE_FAULT 13
#define EXC_STORE_PAGE_FAULT 15
#define IRQ_S_SOFT 1
#define IRQ_S_TIMER 5
/* The first number that the platform may give a meaning: here the host's watchdog. */
#define IRQ_PLATFORM 16
#define IRQ_RESCHEDULE 17
#define IRQ_CALL_FUNCTION 18
#define IRQ_SYNC_CORE 19

#endif
