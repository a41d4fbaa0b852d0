/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Symbols of the kernel by name and by address, and the borders of the image. */
#ifndef _KALLSYMS_H
#define _KALLSYMS_H

#include "types.h"

#define KSYM_NAME_LEN 512
#define KSYM_SYMBOL_LEN (KSYM_NAME_LEN + 48)

unsigned long kallsyms_lookup_name(const char *name);
unsigned long kallsyms_lookup_exported(const char *name);
const char *kallsyms_lookup(unsigned long addr, unsigned long *size, unsigned long *offset,
			    char **modname, char *namebuf);
int kallsyms_lookup_size_offset(unsigned long addr, unsigned long *size, unsigned long *offset);
int kallsyms_on_each_symbol(int (*fn)(void *data, const char *name, void *mod, unsigned long addr),
			    void *data);
int sprint_symbol(char *buffer, unsigned long address);
int sprint_symbol_no_offset(char *buffer, unsigned long address);
int sprint_backtrace(char *buffer, unsigned long address);
int kernel_text_address(unsigned long addr);
int core_kernel_text(unsigned long addr);

extern char _text[], _stext[], _etext[], _sdata[], _edata[], __bss_start[], __bss_stop[], _end[];
extern char __per_cpu_start[], __per_cpu_load[], __per_cpu_size[];
extern char __per_cpu_reserved[], __per_cpu_reserved_size[];

#endif
