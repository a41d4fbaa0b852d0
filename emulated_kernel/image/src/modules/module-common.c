// SPDX-License-Identifier: GPL-2.0-or-later
// Part of every module: its name, its version magic, and where its functions are.
#include "module.h"
#include "version.h"

MODULE_INFO(name, KBUILD_MODNAME);
MODULE_INFO(vermagic, VERMAGIC_STRING);

/* Not every module has both. */
int init_module(void) __weak;
void cleanup_module(void) __weak;

__visible struct module __this_module __section(".gnu.linkonce.this_module") = {
	.name = KBUILD_MODNAME,
	.init = init_module,
	.exit = cleanup_module,
};
