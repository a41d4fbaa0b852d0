/* SPDX-License-Identifier: GPL-2.0-or-later */
/* All lists of events once, with the meanings that their words have now; afterwards they have none. */
#include "trace/task.h"
#include "trace/sched.h"
#include "trace/workqueue.h"
#include "trace/filemap.h"
#include "trace/kmem.h"
#include "trace/timer.h"
#include "trace/signal.h"
#include "trace/irq.h"
#include "trace/skb.h"
#include "trace/net.h"
#include "trace/sock.h"
#ifndef __riscv
#include "trace/exceptions.h"
#include "trace/irq_vectors.h"
#endif
#include "trace/raw_syscalls.h"
#undef EVENT_CLASS
#undef DEFINE_EVENT
#undef __field
#undef __array
#undef __string
