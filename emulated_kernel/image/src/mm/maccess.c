// SPDX-License-Identifier: GPL-2.0-or-later
// Copies from and to user memory, and copies that may not fault.
#include "errno.h"
#include "mm.h"
#include "printk.h"
#include "string.h"
#include "uaccess.h"

bool __access_ok(const void __user *ptr, unsigned long size)
{
	unsigned long addr = (unsigned long)ptr;

	return size <= TASK_SIZE_MAX && addr <= TASK_SIZE_MAX - size;
}

unsigned long _copy_from_user(void *to, const void __user *from, unsigned long n)
{
	unsigned long left = n;

	if (likely(access_ok(from, n)))
		left = copy_user_generic(to, from, n);
	if (unlikely(left))
		memset((char *)to + (n - left), 0, left);
	return left;
}

unsigned long _copy_to_user(void __user *to, const void *from, unsigned long n)
{
	if (likely(access_ok(to, n)))
		n = copy_user_generic(to, from, n);
	return n;
}

unsigned long clear_user(void __user *to, unsigned long n)
{
	if (access_ok(to, n))
		return __clear_user(to, n);
	return n;
}

static noinline long do_strncpy_from_user(char *dst, const char __user *src, long count)
{
	long i;
	u8 c;

	for (i = 0; i < count; i++) {
		if (unlikely(__load_u8_nofault(&c, src + i)))
			return -EFAULT;
		dst[i] = (char)c;
		if (!c)
			return i;
	}
	return count;
}

long strncpy_from_user(char *dst, const char __user *src, long count)
{
	if (unlikely(count <= 0))
		return 0;
	if (!access_ok(src, 1))
		return -EFAULT;
	count = (long)min((unsigned long)count, TASK_SIZE_MAX - (unsigned long)src);
	return do_strncpy_from_user(dst, src, count);
}

/* With the final NUL; 0 for a bad address, more than count for a longer string. */
long strnlen_user(const char __user *str, long count)
{
	long i;
	u8 c;

	if (!access_ok(str, 1))
		return 0;
	for (i = 0; i < count; i++) {
		if (__load_u8_nofault(&c, str + i))
			return 0;
		if (!c)
			return i + 1;
	}
	return count + 1;
}

static bool copy_from_kernel_nofault_allowed(const void *unsafe_src)
{
	return (unsigned long)unsafe_src >= TASK_SIZE_MAX + PAGE_SIZE;
}

long copy_from_kernel_nofault(void *dst, const void *src, size_t size)
{
	const u8 *from = src;
	u8 *to = dst;
	size_t i;

	if (!copy_from_kernel_nofault_allowed(src))
		return -ERANGE;
	for (i = 0; i < size; i++)
		if (__load_u8_nofault(&to[i], from + i))
			return -EFAULT;
	return 0;
}

long strncpy_from_kernel_nofault(char *dst, const void *unsafe_addr, long count)
{
	long ret;

	if (unlikely(count <= 0))
		return 0;
	if (!copy_from_kernel_nofault_allowed(unsafe_addr))
		return -ERANGE;
	ret = do_strncpy_from_user(dst, unsafe_addr, count);
	if (ret < 0) {
		dst[0] = '\0';
		return ret;
	}
	if (ret == count)
		dst[--ret] = '\0';
	return ret + 1;
}
