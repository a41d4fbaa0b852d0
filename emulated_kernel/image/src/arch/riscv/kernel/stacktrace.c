// SPDX-License-Identifier: GPL-2.0-or-later
// Oops reports: registers and the stack's return addresses; then the task ends.
#include "kallsyms.h"
#include "printk.h"
#include "sched.h"
#include "spinlock.h"
#include "uaccess.h"
#include <asm/entry.h>

static int die_counter;
static DEFINE_SPINLOCK(die_lock);
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
static void dump_backtrace(struct task_struct *task, unsigned long sp, const char *loglvl)
{
	unsigned long end = stack_end_of(task, sp);
	unsigned long word;
	int shown = 0;

	printk("%sCall Trace:\n", loglvl);
	for (sp = ALIGN(sp, sizeof(long)); sp < end && shown < 32; sp += sizeof(long)) {
		if (copy_from_kernel_nofault(&word, (void *)sp, sizeof(word)))
			break;
		word = rethook_find_ret_addr(task, (unsigned long *)sp);
		if (!kernel_text_address(word))
			continue;
		printk("%s[<%016lx>] %pB\n", loglvl, word, (void *)word);
		shown++;
	}
}

void show_stack(struct task_struct *task, unsigned long *sp, const char *loglvl)
{
	unsigned long start = (unsigned long)sp;

	if (!task)
		task = current;
	if (!start)
		start = task == current ? (unsigned long)__builtin_frame_address(0) : task->thread.sp;
	dump_backtrace(task, start, loglvl);
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
	dump_backtrace(current, regs->sp, KERN_DEFAULT);
}
NOKPROBE_SYMBOL(show_regs);

void die(struct pt_regs *regs, const char *str)
{
	unsigned long flags;

	spin_lock_irqsave(&die_lock, flags);
	pr_emerg("%s [#%d]\n", str, ++die_counter);
	show_regs(regs);
	spin_unlock_irqrestore(&die_lock, flags);
	printk(KERN_DEFAULT "---[ end trace 0000000000000000 ]---\n");
	if (in_interrupt())
		panic("Fatal exception in interrupt");
	make_task_dead(SIGSEGV);
}
NOKPROBE_SYMBOL(die);
