// SPDX-License-Identifier: GPL-2.0-or-later
// start_kernel(): everything in its order, until the idle loop takes over.
#include "entry.h"
#include "fs.h"
#include "host_abi.h"
#include "mm.h"
#include "module.h"
#include "net.h"
#include "printk.h"
#include "sched.h"
#include "smp.h"
#include "timer.h"
#include "workqueue.h"

extern const char linux_banner[];
void start_kernel(void) __noreturn;

static struct completion kthreadd_done;

/* Becomes process 1, which is in user mode from then on. */
static int kernel_init(void *unused __attribute__((unused)))
{
	wait_for_completion(&kthreadd_done);
	smp_init();
	workqueue_init();
	__set_task_comm(current, "init", false);
	current->flags |= PF_HOST;
	current->files = alloc_files();
	pr_info("Run /init as init process\n");
	return 0;
}

static noinline __noreturn void rest_init(void)
{
	pid_t pid;

	init_completion(&kthreadd_done);
	pid = user_mode_thread(kernel_init, NULL, CLONE_FS);
	child_reaper = find_task_by_vpid(pid);
	pid = kernel_thread(kthreadd, NULL, CLONE_FS | CLONE_FILES);
	kthreadd_task = find_task_by_vpid(pid);
	complete(&kthreadd_done);
	host_hypercall(HYPERCALL_BOOTED, 0, 0, 0, 0);
	local_irq_enable();
	schedule_preempt_disabled();
	cpu_startup_entry();
}

__visible __init void start_kernel(void)
{
	local_irq_disable();
	setup_arch();
	pr_notice("%s", linux_banner);
	mem_init();
	kmem_cache_init();
	sched_init();
	timers_init();
	fork_init();
	vfs_caches_init();
	tracefs_init();
	sock_init();
	modules_init();
	rest_init();
}
