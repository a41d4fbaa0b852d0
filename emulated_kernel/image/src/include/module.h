/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Loadable modules: what a module says of itself, and what the kernel keeps of it. */
#ifndef _MODULE_H
#define _MODULE_H

#include "atomic.h"
#include "elf.h"
#include "list.h"
#include "notifier.h"

#define MODULE_NAME_LEN 56

enum module_state {
	MODULE_STATE_LIVE,     /* in use */
	MODULE_STATE_COMING,   /* complete, its init function runs */
	MODULE_STATE_GOING,    /* on its way out */
	MODULE_STATE_UNFORMED, /* still or already in pieces: nobody may look */
};

enum mod_mem_type {
	MOD_TEXT,
	MOD_DATA,
	MOD_INIT_TEXT, /* both are freed when the init function has returned */
	MOD_INIT_DATA,
	MOD_MEM_NUM_TYPES,
};

/* Text is relocated in a copy, which the host puts where it belongs. */
struct module_memory {
	char *base;
	char *writable;
	unsigned long size;
};

struct mod_kallsyms {
	u32 num_symtab;
	Elf_Sym *symtab; /* values are addresses */
	char *strtab;
	char *typetab;
};

struct kernel_symbol {
	unsigned long value;
	const char *name;
};

/* One module uses another: on the other's source_list, on its own target_list. */
struct module_use {
	struct list_head source_list, target_list;
	struct module *source, *target;
};

struct exception_table_entry;
struct bug_entry;

struct module {
	u32 state;
	atomic_t refcnt; /* users, and one for as long as it may be used */
	struct list_head list;
	char name[MODULE_NAME_LEN];
	int (*init)(void);
	void (*exit)(void);
	struct module_memory mem[MOD_MEM_NUM_TYPES];
	struct mod_kallsyms *kallsyms; /* while init runs, that of all symbols */
	struct mod_kallsyms *core_kallsyms;
	const struct kernel_symbol *syms;
	const struct exception_table_entry *extable;
	struct bug_entry *bug_table;
	const unsigned long *ftrace_callsites;
	const unsigned long *kprobe_blacklist;
	char *kprobes_text_start, *noinstr_text_start;
	unsigned long num_syms, num_exentries, num_bugs, num_ftrace_callsites, num_kprobe_blacklist;
	unsigned long kprobes_text_size, noinstr_text_size;
	struct list_head source_list; /* modules that use this one */
	struct list_head target_list; /* modules that this one uses */
};

extern struct list_head modules;
struct module *find_module(const char *name);
struct module *__module_address(unsigned long addr);
struct module *__module_text_address(unsigned long addr);
bool is_module_text_address(unsigned long addr);
bool within_module_mem_type(unsigned long addr, const struct module *mod, enum mod_mem_type type);
bool try_module_get(struct module *module);
void module_put(struct module *module);
int module_refcount(struct module *mod);
int register_module_notifier(struct notifier_block *nb);
int unregister_module_notifier(struct notifier_block *nb);
const struct exception_table_entry *search_module_extables(unsigned long addr);
struct bug_entry *module_find_bug(unsigned long bugaddr);
unsigned long module_kallsyms_lookup_name(const char *name);
const char *module_address_lookup(unsigned long addr, unsigned long *size, unsigned long *offset,
				  char **modname, char *namebuf);
void modules_init(void);

#ifdef MODULE
extern struct module __this_module;
#define THIS_MODULE (&__this_module)
#define MODULE_INFO(tag, info)                                             \
	static const char __mod_##tag[] __used                             \
		__section(".modinfo") __aligned(1) = #tag "=" info
#define MODULE_LICENSE(text) MODULE_INFO(license, text)
#define MODULE_DESCRIPTION(text) MODULE_INFO(description, text)
#define module_init(fn) int init_module(void) __cold __alias(fn)
#define module_exit(fn) void cleanup_module(void) __cold __alias(fn)
int init_module(void);
void cleanup_module(void);
#define EXPORT_SYMBOL(sym)                                                     \
	static const struct kernel_symbol __used __section("__ksymtab")        \
		__ksymtab_##sym = { (unsigned long)&sym, #sym }
#endif

#endif
