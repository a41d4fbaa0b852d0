/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Basic types, attributes and macros that every file of the kernel uses. */
#ifndef _TYPES_H
#define _TYPES_H

typedef unsigned char u8, __u8;
typedef unsigned short u16, __u16;
typedef unsigned int u32;
typedef unsigned long long u64, __u64;
typedef signed char s8;
typedef short s16;
typedef int s32;
typedef long long s64;
typedef __SIZE_TYPE__ size_t;
typedef __PTRDIFF_TYPE__ ssize_t;
typedef __PTRDIFF_TYPE__ ptrdiff_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef long off_t;
typedef long long loff_t;
typedef int pid_t;
typedef unsigned int uid_t;
typedef unsigned int gid_t;
typedef unsigned short umode_t;
typedef unsigned int gfp_t;
typedef unsigned int fmode_t;
typedef unsigned int dev_t;
typedef long off_t;
typedef int clockid_t;
typedef s64 ktime_t;
typedef s64 time64_t;
typedef _Bool bool;
typedef __builtin_va_list va_list;

#define va_start(ap, last) __builtin_va_start(ap, last)
#define va_end(ap) __builtin_va_end(ap)
#define va_arg(ap, type) __builtin_va_arg(ap, type)
#define va_copy(to, from) __builtin_va_copy(to, from)

#define NULL ((void *)0)
#define true 1
#define false 0

typedef struct { int counter; } atomic_t;
typedef struct { s64 counter; } atomic64_t;
/* No signal is ever delivered, so nothing looks into one. */
typedef struct { u64 sig; } sigset_t;

struct list_head {
	struct list_head *next, *prev;
};
struct hlist_node {
	struct hlist_node *next, **pprev;
};
struct hlist_head {
	struct hlist_node *first;
};
struct llist_head {
	struct llist_node *first;
};
struct llist_node {
	struct llist_node *next;
};

#define __section(name) __attribute__((section(name)))
#define __used __attribute__((used))
#define __packed __attribute__((packed))
#define __aligned(n) __attribute__((aligned(n)))
#define __weak __attribute__((weak))
#define __cold __attribute__((cold))
#define __noreturn __attribute__((noreturn))
#define __printf(fmt, args) __attribute__((format(printf, fmt, args)))
#define __alias(name) __attribute__((alias(#name)))
#define noinline __attribute__((noinline))
#define __always_inline inline __attribute__((always_inline))
#define __noclone __attribute__((noclone))
#ifdef CC_USING_PATCHABLE_FUNCTION_ENTRY
#define notrace __attribute__((patchable_function_entry(0, 0)))
#else
#define notrace __attribute__((no_instrument_function))
#endif
#define fallthrough __attribute__((fallthrough))
#define asmlinkage
#define __user
#define __force
#ifdef MODULE
#define __init __cold __section(".init.text")
#define __initdata __section(".init.data")
#define __exit __cold __section(".exit.text")
#else
#define __init __cold
#endif
#define __visible __attribute__((externally_visible))
#define __ro_after_init
#define __read_mostly

/* Code that can neither be traced nor probed: entry and exit of the kernel. */
#define noinstr noinline notrace __section(".noinstr.text")
/* Code that can be traced but not probed. */
#define __kprobes __section(".kprobes.text")
#define __lockfunc __section(".spinlock.text")

#define likely(x) __builtin_expect(!!(x), 1)
#define unlikely(x) __builtin_expect(!!(x), 0)
#define barrier() __asm__ __volatile__("" ::: "memory")
#define READ_ONCE(x) (*(const volatile typeof(x) *)&(x))
#define WRITE_ONCE(x, val) (*(volatile typeof(x) *)&(x) = (val))
#define unreachable() __builtin_unreachable()

#define offsetof(type, member) __builtin_offsetof(type, member)
#define container_of(ptr, type, member) ((type *)((char *)(ptr) - offsetof(type, member)))
#define ARRAY_SIZE(a) (sizeof(a) / sizeof((a)[0]))
#define BUILD_BUG_ON(cond) _Static_assert(!(cond), #cond)
#define ALIGN(x, a) (((x) + (typeof(x))(a) - 1) & ~((typeof(x))(a) - 1))
#define ALIGN_DOWN(x, a) ((x) & ~((typeof(x))(a) - 1))
#define DIV_ROUND_UP(n, d) (((n) + (d) - 1) / (d))
#define BIT(n) (1UL << (n))
#define BITS_PER_LONG ((int)(8 * sizeof(long)))

#define min(a, b) ({ typeof(a) _a = (a); typeof(b) _b = (b); _a < _b ? _a : _b; })
#define max(a, b) ({ typeof(a) _a = (a); typeof(b) _b = (b); _a > _b ? _a : _b; })
#define min_t(type, a, b) min((type)(a), (type)(b))
#define max_t(type, a, b) max((type)(a), (type)(b))
#define clamp(v, lo, hi) min(max(v, lo), hi)
#define swap(a, b) do { typeof(a) _t = (a); (a) = (b); (b) = _t; } while (0)

#define INT_MAX 0x7fffffff
#define UINT_MAX 0xffffffffU
#define LONG_MAX ((long)(~0UL >> 1))
#define ULONG_MAX (~0UL)
#define U64_MAX (~0ULL)
#define S64_MAX ((s64)(U64_MAX >> 1))
#define LLONG_MAX ((long long)(~0ULL >> 1))
#define ULLONG_MAX (~0ULL)
#define SIZE_MAX (~(size_t)0)

#define MAX_ERRNO 4095
#define IS_ERR_VALUE(x) unlikely((unsigned long)(x) >= (unsigned long)-MAX_ERRNO)
#define ERR_PTR(error) ((void *)(long)(error))
#define PTR_ERR(ptr) ((long)(ptr))
#define IS_ERR(ptr) IS_ERR_VALUE((unsigned long)(ptr))
#define IS_ERR_OR_NULL(ptr) (unlikely(!(ptr)) || IS_ERR(ptr))
#define PTR_ERR_OR_ZERO(ptr) (IS_ERR(ptr) ? (int)PTR_ERR(ptr) : 0)
#define ERR_CAST(ptr) ((void *)(ptr))

/* Puts an address into the section that the kprobes code reads its blacklist from. */
#define NOKPROBE_SYMBOL(fname)                                         \
	static unsigned long __used __section("_kprobe_blacklist") \
		_kbl_addr_##fname = (unsigned long)fname

#endif
