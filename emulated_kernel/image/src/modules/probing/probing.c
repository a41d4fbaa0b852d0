// SPDX-License-Identifier: GPL-2.0-or-later
// Probes of every kind with handlers of every kind; which of them are registered is told by calls.
#include "errno.h"
#include "kprobes.h"
#include "module.h"
#include "printk.h"
#include "sched.h"

MODULE_DESCRIPTION("probes with handlers in C");
MODULE_LICENSE("GPL");

#if defined(__x86_64__)
#define ARGUMENT(regs) ((regs)->di)
#define RESULT(regs) ((regs)->ax)
#elif defined(__i386__)
#define ARGUMENT(regs) ((regs)->ax)
#define RESULT(regs) ((regs)->ax)
#else
#define ARGUMENT(regs) ((regs)->a0)
#define RESULT(regs) ((regs)->a0)
#endif

unsigned long gcd(unsigned long a, unsigned long b);
unsigned long int_sqrt(unsigned long x);
int probing_register(int which);
int probing_unregister(int which);
int probing_enable(int which, int enable);
int probing_register_many(int bad);
void probing_unregister_many(void);
long probing_noted(int index);

enum { NOTED_BEFORE, NOTED_BEHIND, NOTED_ARGUMENT, NOTED_DISTANCE, NOTED_RETURNS, NOTED_ENTRIES, NR_NOTED };
static long noted[NR_NOTED];

static int note(struct kprobe *p, struct pt_regs *regs)
{
	noted[NOTED_BEFORE]++;
	noted[NOTED_ARGUMENT] = (long)ARGUMENT(regs);
	noted[NOTED_DISTANCE] = (long)(instruction_pointer(regs) - (unsigned long)p->addr);
	return 0;
}

static void note_behind(struct kprobe *p __attribute__((unused)),
			struct pt_regs *regs __attribute__((unused)), unsigned long flags)
{
	if (!flags)
		noted[NOTED_BEHIND]++;
}

static int change_argument(struct kprobe *p __attribute__((unused)), struct pt_regs *regs)
{
	ARGUMENT(regs) = 144;
	return 0;
}

static noinline notrace void return_at_once(void)
{
	asm volatile("");
}
NOKPROBE_SYMBOL(return_at_once);

static int override(struct kprobe *p __attribute__((unused)), struct pt_regs *regs)
{
	RESULT(regs) = 77;
	instruction_pointer_set(regs, (unsigned long)return_at_once);
	return 1;
}

static volatile int *nowhere;

static int fault(struct kprobe *p __attribute__((unused)), struct pt_regs *regs __attribute__((unused)))
{
	return *nowhere;
}

static int loop(struct kprobe *p __attribute__((unused)), struct pt_regs *regs __attribute__((unused)))
{
	for (;;)
		asm volatile("");
	return 0;
}

static int sleep(struct kprobe *p __attribute__((unused)), struct pt_regs *regs __attribute__((unused)))
{
	schedule();
	return 0;
}

/* Whatever it calls may be probed: those hits are missed. */
static int call(struct kprobe *p __attribute__((unused)), struct pt_regs *regs __attribute__((unused)))
{
	noted[NOTED_ARGUMENT] = (long)int_sqrt(81);
	return 0;
}

static int returned(struct kretprobe_instance *ri, struct pt_regs *regs)
{
	noted[NOTED_RETURNS]++;
	noted[NOTED_ARGUMENT] = *(long *)ri->data;
	noted[NOTED_DISTANCE] = get_kretprobe_retaddr(ri) == instruction_pointer(regs) && ri->task == current;
	if (RESULT(regs) == 6)
		RESULT(regs) = 66;
	return 0;
}

/* Calls with an argument of 1 are of no interest. */
static int entered(struct kretprobe_instance *ri, struct pt_regs *regs)
{
	noted[NOTED_ENTRIES]++;
	*(long *)ri->data = (long)ARGUMENT(regs);
	return ARGUMENT(regs) == 1;
}

static struct kprobe probes[] = {
	{ .symbol_name = "gcd", .pre_handler = note, .post_handler = note_behind },
	{ .symbol_name = "int_sqrt", .pre_handler = change_argument },
	{ .symbol_name = "int_sqrt", .pre_handler = override },
	{ .symbol_name = "gcd", .pre_handler = fault },
	{ .symbol_name = "gcd", .pre_handler = loop },
	{ .symbol_name = "gcd", .pre_handler = sleep },
	{ .symbol_name = "gcd", .pre_handler = call },
	{ .symbol_name = "int_sqrt", .pre_handler = note },
	{ .symbol_name = "no_such_function", .pre_handler = note },
	{ .symbol_name = "gcd", .pre_handler = note, .flags = KPROBE_FLAG_DISABLED },
	{ .pre_handler = note },
};
#define NR_PROBES (int)(sizeof(probes) / sizeof(probes[0]))
#define RETURN_PROBE NR_PROBES

static struct kretprobe return_probe = {
	.kp.symbol_name = "gcd",
	.handler = returned,
	.entry_handler = entered,
	.data_size = sizeof(long),
	.maxactive = 3,
};

static struct kprobe more[] = {
	{ .symbol_name = "gcd", .pre_handler = note },
	{ .symbol_name = "int_sqrt", .pre_handler = note },
	{ .symbol_name = "lcm", .pre_handler = note },
};

static struct kprobe *pointers[] = { &more[0], &more[1], &more[2] };

noinline int probing_register(int which)
{
	int err;

	if (which == RETURN_PROBE)
		return register_kretprobe(&return_probe);
	err = register_kprobe(&probes[which]);
	if (!err && !probes[which].addr)
		return -EFAULT;
	return err;
}

noinline int probing_unregister(int which)
{
	if (which == RETURN_PROBE) {
		unregister_kretprobe(&return_probe);
		return_probe.kp.addr = NULL;
		return return_probe.nmissed;
	}
	unregister_kprobe(&probes[which]);
	probes[which].addr = NULL;
	return (int)probes[which].nmissed;
}

noinline int probing_enable(int which, int enable)
{
	int err = enable ? enable_kprobe(&probes[which]) : disable_kprobe(&probes[which]);

	return err ?: kprobe_disabled(&probes[which]);
}

noinline int probing_register_many(int bad)
{
	int i;

	for (i = 0; i < 3; i++)
		more[i].addr = NULL;
	more[2].symbol_name = bad ? "no_such_function" : "lcm";
	return register_kprobes(pointers, 3);
}

noinline void probing_unregister_many(void)
{
	unregister_kprobes(pointers, 3);
}

noinline long probing_noted(int index)
{
	return noted[index];
}

static int __init probing_init(void)
{
	return 0;
}

static void __exit probing_exit(void)
{
	pr_info("probing: unloaded\n");
}

module_init(probing_init);
module_exit(probing_exit);
