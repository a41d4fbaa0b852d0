/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Linux's system call numbers on riscv64, for the calls that this kernel has: those of asm-generic. */
#ifndef _ASM_UNISTD_H
#define _ASM_UNISTD_H

#define NR_syscalls 451

#define __SYSCALLS                \
	__SYSCALL(17, getcwd)     \
	__SYSCALL(23, dup)        \
	__SYSCALL(24, dup3)       \
	__SYSCALL(33, mknodat) \
	__SYSCALL(34, mkdirat)    \
	__SYSCALL(35, unlinkat)   \
	__SYSCALL(36, symlinkat)  \
	__SYSCALL(37, linkat)     \
	__SYSCALL(45, truncate)   \
	__SYSCALL(46, ftruncate)  \
	__SYSCALL(48, faccessat)  \
	__SYSCALL(49, chdir)      \
	__SYSCALL(50, fchdir)     \
	__SYSCALL(52, fchmod)     \
	__SYSCALL(53, fchmodat)   \
	__SYSCALL(54, fchownat)   \
	__SYSCALL(55, fchown)     \
	__SYSCALL(56, openat)     \
	__SYSCALL(57, close)      \
	__SYSCALL(59, pipe2)      \
	__SYSCALL(61, getdents64) \
	__SYSCALL(62, lseek)      \
	__SYSCALL(63, read)       \
	__SYSCALL(64, write)      \
	__SYSCALL(67, pread64)    \
	__SYSCALL(68, pwrite64)   \
	__SYSCALL(73, ppoll)      \
	__SYSCALL(78, readlinkat) \
	__SYSCALL(79, newfstatat) \
	__SYSCALL(80, newfstat)   \
	__SYSCALL(82, fsync)      \
	__SYSCALL(83, fdatasync)  \
	__SYSCALL(88, utimensat)  \
	__SYSCALL(93, exit)       \
	__SYSCALL(94, exit_group) \
	__SYSCALL(101, nanosleep) \
	__SYSCALL(105, init_module) \
	__SYSCALL(106, delete_module) \
	__SYSCALL(113, clock_gettime) \
	__SYSCALL(122, sched_setaffinity) \
	__SYSCALL(123, sched_getaffinity) \
	__SYSCALL(124, sched_yield) \
	__SYSCALL(144, setgid)    \
	__SYSCALL(146, setuid)    \
	__SYSCALL(160, newuname)  \
	__SYSCALL(166, umask)     \
	__SYSCALL(169, gettimeofday) \
	__SYSCALL(172, getpid)    \
	__SYSCALL(173, getppid)   \
	__SYSCALL(174, getuid)    \
	__SYSCALL(176, getgid)    \
	__SYSCALL(178, gettid)    \
	__SYSCALL(198, socket)    \
	__SYSCALL(200, bind)      \
	__SYSCALL(201, listen)    \
	__SYSCALL(202, accept)    \
	__SYSCALL(203, connect)   \
	__SYSCALL(204, getsockname) \
	__SYSCALL(205, getpeername) \
	__SYSCALL(206, sendto)    \
	__SYSCALL(207, recvfrom)  \
	__SYSCALL(210, shutdown)  \
	__SYSCALL(220, clone)     \
	__SYSCALL(221, execve)    \
	__SYSCALL(242, accept4)   \
	__SYSCALL(260, wait4)     \
	__SYSCALL(276, renameat2) \
	__SYSCALL(291, statx) \
	__SYSCALL(437, openat2) \
	__SYSCALL(439, faccessat2)

#endif
