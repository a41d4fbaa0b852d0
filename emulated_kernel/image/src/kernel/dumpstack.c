// SPDX-License-Identifier: GPL-2.0-or-later
// Oops reports: registers and the stack's return addresses; then the task ends.
#include "entry.h"
#include "kallsyms.h"
#include "printk.h"
#include "sched.h"
#include "spinlock.h"
#include "uaccess.h"
#include <asm/stacktrace.h>

static int die_counter;
static DEFINE_SPINLOCK(die_lock);
static int die_owner = -1;
DECLARE_PER_CPU(char *, hardirq_stack_ptr);

static unsigned long stack_end_of(struct task_struct *task, unsigned long sp)
{
	unsigned long low = (unsigned long)task->stack;
	unsigned long irq_top = (unsigned long)this_cpu_read(hardirq_stack_ptr);

	if (sp >= low && sp < low + THREAD_SIZE)
		return low + THREAD_SIZE;
	if (sp < irq_top && sp >= irq_top - THREAD_SIZE)
		return irq_top;
	return (sp | (PAGE_SIZE - 1)) + 1;
}

/* Without frame pointers every text address on the stack may be a return address. */
static void show_trace_log_lvl(struct task_struct *task, unsigned long sp, const char *log_lvl)
{
	unsigned long end = stack_end_of(task, sp);
	unsigned long word;
	int shown = 0;

	printk("%sCall Trace:\n", log_lvl);
	show_trace_start(log_lvl);
	for (sp = ALIGN(sp, sizeof(long)); sp < end && shown < 32; sp += sizeof(long)) {
		if (copy_from_kernel_nofault(&word, (void *)sp, sizeof(word)))
			break;
		word = rethook_find_ret_addr(task, (unsigned long *)sp);
		if (!kernel_text_address(word))
			continue;
		show_trace_entry(log_lvl, word);
		shown++;
	}
	show_trace_end(log_lvl);
}

void show_stack(struct task_struct *task, unsigned long *sp, const char *loglvl)
{
	unsigned long start = (unsigned long)sp;

	if (!task)
		task = current;
	if (!start)
		start = task == current ? (unsigned long)__builtin_frame_address(0) : task->thread.sp;
	show_trace_log_lvl(task, start, loglvl);
}

void dump_stack(void)
{
	printk(KERN_DEFAULT "CPU: %d PID: %d Comm: %s\n", smp_processor_id(), current->pid,
	       current->comm);
	show_stack(NULL, NULL, KERN_DEFAULT);
}

void show_regs(struct pt_regs *regs)
{
	printk(KERN_DEFAULT "CPU: %d PID: %d Comm: %s 6.1.0-kprobefs\n", smp_processor_id(),
	       current->pid, current->comm);
	__show_regs(regs);
	show_trace_log_lvl(current, regs->sp, KERN_DEFAULT);
}
NOKPROBE_SYMBOL(show_regs);

static noinline void __die(const char *str, struct pt_regs *regs, long err)
{
	show_die(str, err, ++die_counter);
	show_regs(regs);
}
NOKPROBE_SYMBOL(__die);

static unsigned long oops_begin(void)
{
	unsigned long flags;

	local_irq_save(flags);
	/* What faults while it reports an oops holds the lock already. */
	if (!spin_trylock(&die_lock) && die_owner != smp_processor_id())
		spin_lock(&die_lock);
	die_owner = smp_processor_id();
	return flags;
}
NOKPROBE_SYMBOL(oops_begin);

static void oops_end(unsigned long flags, int signr)
{
	die_owner = -1;
	spin_unlock_irqrestore(&die_lock, flags);
	printk(KERN_DEFAULT "---[ end trace 0000000000000000 ]---\n");
	if (in_interrupt())
		panic("Fatal exception in interrupt");
	make_task_dead(signr);
}
NOKPROBE_SYMBOL(oops_end);

void die(const char *str, struct pt_regs *regs, long err)
{
	unsigned long flags = oops_begin();

	__die(str, regs, err);
	oops_end(flags, SIGSEGV);
}
NOKPROBE_SYMBOL(die);
