/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Parameters of modules: described in .modinfo; `load` in machine/modules sets none, so each keeps its value. */
#ifndef _LINUX_MODULEPARAM_H
#define _LINUX_MODULEPARAM_H

#include "../types.h"

#define __PARM_INFO(kind, name, text)                                      \
	static const char __mod_##kind##_##name[] __used                   \
		__section(".modinfo") __aligned(1) = #kind "=" #name ":" text
#define module_param(name, type, perm) __PARM_INFO(parmtype, name, #type)
#define module_param_string(name, string, len, perm) __PARM_INFO(parmtype, name, "string")
#define MODULE_PARM_DESC(name, text) __PARM_INFO(parm, name, text)

#endif
