// SPDX-License-Identifier: GPL-2.0-or-later
// The banner, which is in a file of its own as tools look for it.
#include "printk.h"
#include "version.h"

const char linux_banner[] =
	"Linux version " UTS_RELEASE " (kprobefs@localhost) (" KERNEL_COMPILER ") " UTS_VERSION "\n";
const char linux_proc_banner[] = "%s version %s (kprobefs@localhost) (" KERNEL_COMPILER ") %s\n";
