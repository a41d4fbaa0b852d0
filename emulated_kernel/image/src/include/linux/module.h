/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What modules written for Linux expect of <linux/module.h>. */
#ifndef _LINUX_MODULE_H
#define _LINUX_MODULE_H

#include "kernel.h"
#include "moduleparam.h"
#include "../module.h"

/* Linux's macros end the declaration themselves. */
#undef module_init
#undef module_exit
#define module_init(fn) int init_module(void) __cold __alias(fn);
#define module_exit(fn) void cleanup_module(void) __cold __alias(fn);
#define MODULE_AUTHOR(text) MODULE_INFO(author, text)
#define MODULE_VERSION(text) MODULE_INFO(version, text)
#define MODULE_ALIAS(text) MODULE_INFO(alias, text)
#define EXPORT_SYMBOL_GPL(sym) EXPORT_SYMBOL(sym)

#endif
