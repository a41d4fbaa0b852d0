/* SPDX-License-Identifier: GPL-2.0-or-later */
/* SYSCALL_DEFINEn: the typed function of a system call and its entry from struct pt_regs. */
#ifndef _SYSCALLS_H
#define _SYSCALLS_H

#include "types.h"
#include <asm/syscall.h>

/* All six, whether the call has them or not. */
static __always_inline void syscall_get_arguments(const struct pt_regs *regs, unsigned long *args)
{
	int i;

	for (i = 0; i < 6; i++)
		args[i] = syscall_arg(regs, i);
}

typedef long (*sys_call_ptr_t)(const struct pt_regs *regs);

/* What trace events tell of a system call: types and names of its arguments. */
struct syscall_metadata {
	const char *name;
	unsigned long nb_args;
	const char *const *types;
	const char *const *args;
};

#define __SC_PARAMS0() void
#define __SC_PARAMS1(t, a) t a
#define __SC_PARAMS2(t, a, ...) t a, __SC_PARAMS1(__VA_ARGS__)
#define __SC_PARAMS3(t, a, ...) t a, __SC_PARAMS2(__VA_ARGS__)
#define __SC_PARAMS4(t, a, ...) t a, __SC_PARAMS3(__VA_ARGS__)
#define __SC_PARAMS5(t, a, ...) t a, __SC_PARAMS4(__VA_ARGS__)
#define __SC_PARAMS6(t, a, ...) t a, __SC_PARAMS5(__VA_ARGS__)

#define __SC_REGS0(r)
#define __SC_REGS1(r, t, a) (t)syscall_arg(r, 0)
#define __SC_REGS2(r, t, a, t1, a1) __SC_REGS1(r, t, a), (t1)syscall_arg(r, 1)
#define __SC_REGS3(r, t, a, t1, a1, t2, a2) \
	__SC_REGS2(r, t, a, t1, a1), (t2)syscall_arg(r, 2)
#define __SC_REGS4(r, t, a, t1, a1, t2, a2, t3, a3) \
	__SC_REGS3(r, t, a, t1, a1, t2, a2), (t3)syscall_arg(r, 3)
#define __SC_REGS5(r, t, a, t1, a1, t2, a2, t3, a3, t4, a4) \
	__SC_REGS4(r, t, a, t1, a1, t2, a2, t3, a3), (t4)syscall_arg(r, 4)
#define __SC_REGS6(r, t, a, t1, a1, t2, a2, t3, a3, t4, a4, t5, a5) \
	__SC_REGS5(r, t, a, t1, a1, t2, a2, t3, a3, t4, a4), (t5)syscall_arg(r, 5)

#define __SC_TYPES1(t, a) #t
#define __SC_TYPES2(t, a, ...) #t, __SC_TYPES1(__VA_ARGS__)
#define __SC_TYPES3(t, a, ...) #t, __SC_TYPES2(__VA_ARGS__)
#define __SC_TYPES4(t, a, ...) #t, __SC_TYPES3(__VA_ARGS__)
#define __SC_TYPES5(t, a, ...) #t, __SC_TYPES4(__VA_ARGS__)
#define __SC_TYPES6(t, a, ...) #t, __SC_TYPES5(__VA_ARGS__)
#define __SC_NAMES1(t, a) #a
#define __SC_NAMES2(t, a, ...) #a, __SC_NAMES1(__VA_ARGS__)
#define __SC_NAMES3(t, a, ...) #a, __SC_NAMES2(__VA_ARGS__)
#define __SC_NAMES4(t, a, ...) #a, __SC_NAMES3(__VA_ARGS__)
#define __SC_NAMES5(t, a, ...) #a, __SC_NAMES4(__VA_ARGS__)
#define __SC_NAMES6(t, a, ...) #a, __SC_NAMES5(__VA_ARGS__)

#define SYSCALL_METADATA(sname, n, types, args)                            \
	const struct syscall_metadata __syscall_meta_##sname = { "sys_" #sname, n, types, args }

#define __SYSCALL_DEFINEx(n, name, ...)                                    \
	static const char *const types_##name[] = { __SC_TYPES##n(__VA_ARGS__) }; \
	static const char *const args_##name[] = { __SC_NAMES##n(__VA_ARGS__) }; \
	SYSCALL_METADATA(name, n, types_##name, args_##name);              \
	static __always_inline long __do_sys_##name(__SC_PARAMS##n(__VA_ARGS__)); \
	long SYSCALL_SYMBOL(name)(const struct pt_regs *regs);             \
	long SYSCALL_SYMBOL(name)(const struct pt_regs *regs)              \
	{                                                                  \
		return __do_sys_##name(__SC_REGS##n(regs, __VA_ARGS__));   \
	}                                                                  \
	static __always_inline long __do_sys_##name(__SC_PARAMS##n(__VA_ARGS__))

#define SYSCALL_DEFINE0(name)                                              \
	SYSCALL_METADATA(name, 0, NULL, NULL);                             \
	long SYSCALL_SYMBOL(name)(const struct pt_regs *regs);             \
	long SYSCALL_SYMBOL(name)(const struct pt_regs *__unused_regs __attribute__((unused)))
#define SYSCALL_DEFINE1(name, ...) __SYSCALL_DEFINEx(1, name, __VA_ARGS__)
#define SYSCALL_DEFINE2(name, ...) __SYSCALL_DEFINEx(2, name, __VA_ARGS__)
#define SYSCALL_DEFINE3(name, ...) __SYSCALL_DEFINEx(3, name, __VA_ARGS__)
#define SYSCALL_DEFINE4(name, ...) __SYSCALL_DEFINEx(4, name, __VA_ARGS__)
#define SYSCALL_DEFINE5(name, ...) __SYSCALL_DEFINEx(5, name, __VA_ARGS__)
#define SYSCALL_DEFINE6(name, ...) __SYSCALL_DEFINEx(6, name, __VA_ARGS__)

#endif
