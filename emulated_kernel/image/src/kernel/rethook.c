// SPDX-License-Identifier: GPL-2.0-or-later
// What the kernel has to know of hooked returns: a task's birth, its end, and the real caller.
#include "bug.h"
#include "printk.h"
#include "rethook.h"
#include "sched.h"
#include <asm/host_trap.h>

/* Where hooked functions return to; the host sets it when the first one is hooked. */
unsigned long host_return_trampoline;
/* The same for those whose handlers are guest code; 0 while there are none. */
unsigned long host_native_return_trampoline;

notrace void rethook_init_task(struct task_struct *tsk)
{
	(void)(struct rethook_node *)NULL; /* A cast puts the type into the types of the image. */
	tsk->nr_pending = tsk->ret_stack = tsk->curr_ret_stack = 0;
}
NOKPROBE_SYMBOL(rethook_init_task);

/* Nobody will return through what is still pending. */
noinline notrace void rethook_flush_task(struct task_struct *tsk)
{
	if (host_return_trampoline && (tsk->nr_pending || tsk->ret_stack))
		HOST_TRAP(rethook_flush_trap, tsk, 0);
}
NOKPROBE_SYMBOL(rethook_flush_task);

/* The address that a stack slot held before its function was hooked; else what it holds. */
noinline notrace unsigned long rethook_find_ret_addr(struct task_struct *tsk, unsigned long *slot)
{
	unsigned long addr = *slot;

	if (!addr || (addr != host_return_trampoline && addr != host_native_return_trampoline))
		return addr;
	return HOST_TRAP(rethook_find_trap, tsk, slot);
}
NOKPROBE_SYMBOL(rethook_find_ret_addr);

/* The host comes here if a function returns that nobody has hooked. */
/* rp, addr: the kretprobe whose turn it would have been. */
__visible noinline notrace void rethook_bug(bool is_kretprobe, unsigned long rp, unsigned long addr)
{
	if (is_kretprobe)
		pr_err("kretprobe BUG!: Processing kretprobe %lx @ %lx\n", rp, addr);
	else
		pr_err("rethook: Return address not found! Maybe there is a bug in the kernel\n");
	BUG();
}
NOKPROBE_SYMBOL(rethook_bug);
