/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Linux's system call numbers on i386, for the calls that this kernel has. */
#ifndef _ASM_UNISTD_32_H
#define _ASM_UNISTD_32_H

#define NR_syscalls 451

#define __SYSCALLS                \
	__SYSCALL(1, exit)        \
	__SYSCALL(2, fork)        \
	__SYSCALL(3, read)        \
	__SYSCALL(4, write)       \
	__SYSCALL(5, open)        \
	__SYSCALL(6, close)       \
	__SYSCALL(8, creat)       \
	__SYSCALL(9, link)        \
	__SYSCALL(10, unlink)     \
	__SYSCALL(11, execve)     \
	__SYSCALL(12, chdir)      \
	__SYSCALL(15, chmod)      \
	__SYSCALL(19, lseek)      \
	__SYSCALL(20, getpid)     \
	__SYSCALL(33, access)     \
	__SYSCALL(38, rename)     \
	__SYSCALL(39, mkdir)      \
	__SYSCALL(40, rmdir)      \
	__SYSCALL(41, dup)        \
	__SYSCALL(42, pipe)       \
	__SYSCALL(60, umask)      \
	__SYSCALL(63, dup2)       \
	__SYSCALL(64, getppid)    \
	__SYSCALL(78, gettimeofday) \
	__SYSCALL(83, symlink)    \
	__SYSCALL(85, readlink)   \
	__SYSCALL(92, truncate)   \
	__SYSCALL(93, ftruncate)  \
	__SYSCALL(94, fchmod)     \
	__SYSCALL(106, newstat)   \
	__SYSCALL(107, newlstat)  \
	__SYSCALL(108, newfstat)  \
	__SYSCALL(114, wait4)     \
	__SYSCALL(118, fsync)     \
	__SYSCALL(120, clone)     \
	__SYSCALL(122, newuname)  \
	__SYSCALL(128, init_module) \
	__SYSCALL(129, delete_module) \
	__SYSCALL(133, fchdir)    \
	__SYSCALL(148, fdatasync) \
	__SYSCALL(158, sched_yield) \
	__SYSCALL(162, nanosleep) \
	__SYSCALL(168, poll)      \
	__SYSCALL(180, ia32_pread64) \
	__SYSCALL(181, ia32_pwrite64) \
	__SYSCALL(183, getcwd)    \
	__SYSCALL(190, vfork)     \
	__SYSCALL(193, ia32_truncate64) \
	__SYSCALL(194, ia32_ftruncate64) \
	__SYSCALL(198, lchown)    \
	__SYSCALL(199, getuid)    \
	__SYSCALL(200, getgid)    \
	__SYSCALL(207, fchown)    \
	__SYSCALL(212, chown)     \
	__SYSCALL(213, setuid)    \
	__SYSCALL(214, setgid)    \
	__SYSCALL(220, getdents64) \
	__SYSCALL(224, gettid)    \
	__SYSCALL(241, sched_setaffinity) \
	__SYSCALL(242, sched_getaffinity) \
	__SYSCALL(252, exit_group) \
	__SYSCALL(295, openat)    \
	__SYSCALL(296, mkdirat) \
	__SYSCALL(298, fchownat) \
	__SYSCALL(300, newfstatat) \
	__SYSCALL(301, unlinkat)  \
	__SYSCALL(303, linkat) \
	__SYSCALL(304, symlinkat) \
	__SYSCALL(305, readlinkat) \
	__SYSCALL(306, fchmodat) \
	__SYSCALL(307, faccessat) \
	__SYSCALL(330, dup3)      \
	__SYSCALL(331, pipe2)     \
	__SYSCALL(353, renameat2) \
	__SYSCALL(359, socket)    \
	__SYSCALL(361, bind)      \
	__SYSCALL(362, connect)   \
	__SYSCALL(363, listen)    \
	__SYSCALL(364, accept4)   \
	__SYSCALL(367, getsockname) \
	__SYSCALL(368, getpeername) \
	__SYSCALL(369, sendto)    \
	__SYSCALL(371, recvfrom)  \
	__SYSCALL(373, shutdown)  \
	__SYSCALL(403, clock_gettime) \
	__SYSCALL(412, utimensat) \
	__SYSCALL(414, ppoll)     \
	__SYSCALL(437, openat2)

#endif
