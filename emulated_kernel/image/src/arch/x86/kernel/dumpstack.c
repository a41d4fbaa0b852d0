// SPDX-License-Identifier: GPL-2.0-or-later
// Oops reports: registers, code bytes and the stack's return addresses; then the task ends.
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
static void show_trace_log_lvl(struct task_struct *task, unsigned long sp, const char *log_lvl)
{
	unsigned long end = stack_end_of(task, sp);
	unsigned long word;
	int shown = 0;

	printk("%sCall Trace:\n", log_lvl);
	printk("%s <TASK>\n", log_lvl);
	for (sp = ALIGN(sp, sizeof(long)); sp < end && shown < 32; sp += sizeof(long)) {
		if (copy_from_kernel_nofault(&word, (void *)sp, sizeof(word)))
			break;
		word = rethook_find_ret_addr(task, (unsigned long *)sp);
		if (!kernel_text_address(word))
			continue;
		printk("%s ? %pB\n", log_lvl, (void *)word);
		shown++;
	}
	printk("%s </TASK>\n", log_lvl);
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

noinline void show_opcodes(struct pt_regs *regs)
{
	char text[3 * 64 + 8];
	u8 byte;
	int i, len = 0;

	for (i = -42; i < 22; i++) {
		if (copy_from_kernel_nofault(&byte, (u8 *)regs->ip + i, 1)) {
			printk(KERN_DEFAULT "Code: Unable to access opcode bytes at 0x%lx.\n",
			       regs->ip - 42);
			return;
		}
		len += scnprintf(text + len, sizeof(text) - len, i ? " %02x" : " <%02x>", byte);
	}
	printk(KERN_DEFAULT "Code:%s\n", text);
}

void show_regs(struct pt_regs *regs)
{
	printk(KERN_DEFAULT "CPU: %d PID: %d Comm: %s 6.1.0-kprobefs\n", smp_processor_id(),
	       current->pid, current->comm);
	__show_regs(regs);
	show_trace_log_lvl(current, regs->sp, KERN_DEFAULT);
}
NOKPROBE_SYMBOL(show_regs);

static noinline int __die(const char *str, struct pt_regs *regs, long err)
{
	printk(KERN_DEFAULT "%s: %04lx [#%d] PREEMPT\n", str, err & 0xffff, ++die_counter);
	show_regs(regs);
	return 0;
}
NOKPROBE_SYMBOL(__die);

static unsigned long oops_begin(void)
{
	unsigned long flags;

	spin_lock_irqsave(&die_lock, flags);
	return flags;
}
NOKPROBE_SYMBOL(oops_begin);

static void oops_end(unsigned long flags, int signr)
{
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

	oops_end(flags, __die(str, regs, err) ? 0 : SIGSEGV);
}
NOKPROBE_SYMBOL(die);
