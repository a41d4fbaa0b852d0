// SPDX-License-Identifier: GPL-2.0-or-later
// Registering probes from within the kernel: the engine is the host's, which calls the handlers.
#include "kprobes.h"
#include "errno.h"
#include "host_abi.h"

/* Where the function that a jprobe calls ends; the host sets it, where it has jprobes. */
unsigned long host_jprobe_return;

static int host_kprobes(int op, void *probe)
{
	return (int)host_hypercall(HYPERCALL_KPROBES, op, 0, (unsigned long)probe, 0);
}

/* All of them or none; the last ones first again. */
static int register_all(void **probes, int num, int op, int undo)
{
	int i, err = num > 0 ? 0 : -EINVAL;

	for (i = 0; i < num && !err; i++)
		err = host_kprobes(op, probes[i]);
	if (err)
		for (i -= 2; i >= 0; i--)
			host_kprobes(undo, probes[i]);
	return err;
}

static void unregister_all(void **probes, int num, int op)
{
	int i;

	for (i = 0; i < num; i++)
		host_kprobes(op, probes[i]);
}

int register_kprobe(struct kprobe *p)
{
	return host_kprobes(KPROBE_OP_REGISTER, p);
}

void unregister_kprobe(struct kprobe *p)
{
	host_kprobes(KPROBE_OP_UNREGISTER, p);
}

int register_kprobes(struct kprobe **kps, int num)
{
	return register_all((void **)kps, num, KPROBE_OP_REGISTER, KPROBE_OP_UNREGISTER);
}

void unregister_kprobes(struct kprobe **kps, int num)
{
	unregister_all((void **)kps, num, KPROBE_OP_UNREGISTER);
}

int register_kretprobe(struct kretprobe *rp)
{
	return host_kprobes(KPROBE_OP_REGISTER_RETURN, rp);
}

void unregister_kretprobe(struct kretprobe *rp)
{
	host_kprobes(KPROBE_OP_UNREGISTER, rp);
}

int register_kretprobes(struct kretprobe **rps, int num)
{
	return register_all((void **)rps, num, KPROBE_OP_REGISTER_RETURN, KPROBE_OP_UNREGISTER);
}

void unregister_kretprobes(struct kretprobe **rps, int num)
{
	unregister_all((void **)rps, num, KPROBE_OP_UNREGISTER);
}

int register_jprobe(struct jprobe *jp)
{
	return host_kprobes(KPROBE_OP_REGISTER_JPROBE, jp);
}

void unregister_jprobe(struct jprobe *jp)
{
	host_kprobes(KPROBE_OP_UNREGISTER, jp);
}

int register_jprobes(struct jprobe **jps, int num)
{
	return register_all((void **)jps, num, KPROBE_OP_REGISTER_JPROBE, KPROBE_OP_UNREGISTER);
}

void unregister_jprobes(struct jprobe **jps, int num)
{
	unregister_all((void **)jps, num, KPROBE_OP_UNREGISTER);
}

notrace void jprobe_return(void)
{
	((void (*)(void))host_jprobe_return)();
	unreachable();
}
NOKPROBE_SYMBOL(jprobe_return);

int enable_kprobe(struct kprobe *kp)
{
	return host_kprobes(KPROBE_OP_ENABLE, kp);
}

int disable_kprobe(struct kprobe *kp)
{
	return host_kprobes(KPROBE_OP_DISABLE, kp);
}
