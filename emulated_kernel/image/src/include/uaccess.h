/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Access to user memory; a bad pointer is mended by the exception table. */
#ifndef _UACCESS_H
#define _UACCESS_H

#include "extable.h"

bool __access_ok(const void __user *ptr, unsigned long size);
#define access_ok(ptr, size) __access_ok(ptr, size)
unsigned long _copy_from_user(void *to, const void __user *from, unsigned long n);
unsigned long _copy_to_user(void __user *to, const void *from, unsigned long n);
#define copy_from_user(to, from, n) _copy_from_user(to, from, n)
#define copy_to_user(to, from, n) _copy_to_user(to, from, n)
long strncpy_from_user(char *dst, const char __user *src, long count);
long strnlen_user(const char __user *str, long count);
unsigned long clear_user(void __user *to, unsigned long n);
long copy_from_kernel_nofault(void *dst, const void *src, size_t size);
long strncpy_from_kernel_nofault(char *dst, const void *unsafe_addr, long count);

struct exception_table_entry {
	s32 insn, fixup; /* relative to the fields themselves */
};
const struct exception_table_entry *search_exception_tables(unsigned long addr);
void sort_main_extable(void);

#endif
