/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Linux's system call numbers on x86_64, for the calls that this kernel has. */
#ifndef _ASM_UNISTD_64_H
#define _ASM_UNISTD_64_H

#define NR_syscalls 451

#define __SYSCALLS                \
	__SYSCALL(0, read)        \
	__SYSCALL(1, write)       \
	__SYSCALL(2, open)        \
	__SYSCALL(3, close)       \
	__SYSCALL(4, newstat)     \
	__SYSCALL(5, newfstat)    \
	__SYSCALL(6, newlstat)    \
	__SYSCALL(7, poll)        \
	__SYSCALL(8, lseek)       \
	__SYSCALL(17, pread64)    \
	__SYSCALL(18, pwrite64)   \
	__SYSCALL(21, access)     \
	__SYSCALL(22, pipe)       \
	__SYSCALL(24, sched_yield) \
	__SYSCALL(32, dup)        \
	__SYSCALL(33, dup2)       \
	__SYSCALL(35, nanosleep)  \
	__SYSCALL(39, getpid)     \
	__SYSCALL(41, socket)     \
	__SYSCALL(42, connect)    \
	__SYSCALL(43, accept)     \
	__SYSCALL(44, sendto)     \
	__SYSCALL(45, recvfrom)   \
	__SYSCALL(48, shutdown)   \
	__SYSCALL(49, bind)       \
	__SYSCALL(50, listen)     \
	__SYSCALL(51, getsockname) \
	__SYSCALL(52, getpeername) \
	__SYSCALL(56, clone)      \
	__SYSCALL(57, fork)       \
	__SYSCALL(58, vfork)      \
	__SYSCALL(59, execve)     \
	__SYSCALL(60, exit)       \
	__SYSCALL(61, wait4)      \
	__SYSCALL(63, newuname)   \
	__SYSCALL(74, fsync)      \
	__SYSCALL(75, fdatasync)  \
	__SYSCALL(76, truncate)   \
	__SYSCALL(77, ftruncate)  \
	__SYSCALL(79, getcwd)     \
	__SYSCALL(80, chdir)      \
	__SYSCALL(81, fchdir)     \
	__SYSCALL(82, rename)     \
	__SYSCALL(83, mkdir)      \
	__SYSCALL(84, rmdir)      \
	__SYSCALL(85, creat)      \
	__SYSCALL(86, link)       \
	__SYSCALL(87, unlink)     \
	__SYSCALL(88, symlink)    \
	__SYSCALL(89, readlink)   \
	__SYSCALL(90, chmod)      \
	__SYSCALL(91, fchmod)     \
	__SYSCALL(92, chown)      \
	__SYSCALL(93, fchown)     \
	__SYSCALL(94, lchown)     \
	__SYSCALL(95, umask)      \
	__SYSCALL(96, gettimeofday) \
	__SYSCALL(102, getuid)    \
	__SYSCALL(104, getgid)    \
	__SYSCALL(105, setuid)    \
	__SYSCALL(106, setgid)    \
	__SYSCALL(110, getppid)   \
	__SYSCALL(175, init_module) \
	__SYSCALL(176, delete_module) \
	__SYSCALL(186, gettid)    \
	__SYSCALL(203, sched_setaffinity) \
	__SYSCALL(204, sched_getaffinity) \
	__SYSCALL(217, getdents64) \
	__SYSCALL(228, clock_gettime) \
	__SYSCALL(231, exit_group) \
	__SYSCALL(257, openat)    \
	__SYSCALL(258, mkdirat) \
	__SYSCALL(260, fchownat) \
	__SYSCALL(262, newfstatat) \
	__SYSCALL(263, unlinkat)  \
	__SYSCALL(265, linkat) \
	__SYSCALL(266, symlinkat) \
	__SYSCALL(267, readlinkat) \
	__SYSCALL(268, fchmodat) \
	__SYSCALL(269, faccessat) \
	__SYSCALL(271, ppoll)     \
	__SYSCALL(280, utimensat) \
	__SYSCALL(288, accept4)   \
	__SYSCALL(292, dup3)      \
	__SYSCALL(293, pipe2)     \
	__SYSCALL(316, renameat2) \
	__SYSCALL(437, openat2)

#endif
