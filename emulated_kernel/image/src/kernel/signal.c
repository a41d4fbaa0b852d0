// SPDX-License-Identifier: GPL-2.0-or-later
// Signals that the kernel itself sends: traced, and of no effect, as the host's processes get their own.
#include "sched.h"
#include "tracepoint.h"

int send_sig(int sig, struct task_struct *p, int priv)
{
	trace_signal_generate(sig, priv ? SI_KERNEL : SI_USER, p, 0, TRACE_SIGNAL_DELIVERED);
	return 0;
}
