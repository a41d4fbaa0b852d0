/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What modules written for Linux expect of <linux/kernel.h>; other headers are found without their own files here. */
#ifndef _LINUX_KERNEL_H
#define _LINUX_KERNEL_H

#include "../errno.h"
#include "../kallsyms.h"
#include "../printk.h"
#include "../string.h"
#include "../types.h"

#if defined(__x86_64__) || defined(__i386__)
#define CONFIG_X86 1
#elif defined(__riscv)
#define CONFIG_RISCV 1
#endif

#endif
