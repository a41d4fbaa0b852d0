// SPDX-License-Identifier: GPL-2.0-or-later
// System calls of i386 that take a 64-bit offset in two registers, the low half first.
#include "fs.h"
#include "syscalls.h"

static __always_inline loff_t offset_of(u32 low, u32 high)
{
	return (loff_t)((u64)high << 32 | low);
}

SYSCALL_DEFINE5(ia32_pread64, unsigned int, fd, char __user *, ubuf, u32, count, u32, poslo, u32, poshi)
{
	return ksys_pread64(fd, ubuf, count, offset_of(poslo, poshi));
}

SYSCALL_DEFINE5(ia32_pwrite64, unsigned int, fd, const char __user *, ubuf, u32, count, u32, poslo,
		u32, poshi)
{
	return ksys_pwrite64(fd, ubuf, count, offset_of(poslo, poshi));
}

SYSCALL_DEFINE3(ia32_truncate64, const char __user *, filename, u32, offset_low, u32, offset_high)
{
	return do_sys_truncate(filename, offset_of(offset_low, offset_high));
}

SYSCALL_DEFINE3(ia32_ftruncate64, unsigned int, fd, u32, offset_low, u32, offset_high)
{
	return do_sys_ftruncate(fd, offset_of(offset_low, offset_high));
}
