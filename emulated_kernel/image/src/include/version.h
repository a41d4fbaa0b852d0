/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What the kernel calls itself; the same in every build. */
#ifndef _VERSION_H
#define _VERSION_H

#define UTS_RELEASE "6.1.0-kprobefs"
#define UTS_VERSION "#1 PREEMPT"
#define VERMAGIC_STRING UTS_RELEASE " preempt mod_unload "
#define UTS_MACHINE KERNEL_MACHINE
#define KERNEL_COMPILER "gcc 12"

#endif
