// SPDX-License-Identifier: GPL-2.0-or-later
// Loading and unloading of modules, and who may use one.
#include "errno.h"
#include "host_abi.h"
#include "kallsyms.h"
#include "mm.h"
#include "moduleloader.h"
#include "printk.h"
#include "sched.h"
#include "string.h"
#include "syscalls.h"
#include "uaccess.h"
#include "version.h"

#define MODULE_REF_BASE 1
#ifdef CC_USING_PATCHABLE_FUNCTION_ENTRY
#define FTRACE_CALLSITE_SECTION "__patchable_function_entries"
#else
#define FTRACE_CALLSITE_SECTION "__mcount_loc"
#endif

LIST_HEAD(modules);
DEFINE_MUTEX(module_mutex);
static BLOCKING_NOTIFIER_HEAD(module_notify_list);

int register_module_notifier(struct notifier_block *nb)
{
	return blocking_notifier_chain_register(&module_notify_list, nb);
}

int unregister_module_notifier(struct notifier_block *nb)
{
	return blocking_notifier_chain_unregister(&module_notify_list, nb);
}

/* The host keeps the symbols, and what is probed. */
static int host_module_notify(struct notifier_block *nb __attribute__((unused)), unsigned long state,
			      void *mod)
{
	long err = host_hypercall(HYPERCALL_MODULE, MODULE_OP_NOTIFY, 0, state, (unsigned long)mod);

	return notifier_from_errno((int)err);
}
NOKPROBE_SYMBOL(host_module_notify);

static struct notifier_block host_module_nb = { .notifier_call = host_module_notify };

__init void modules_init(void)
{
	register_module_notifier(&host_module_nb);
}

/* Finding */

static struct module *find_module_all(const char *name, bool even_unformed)
{
	struct module *mod;

	list_for_each_entry(mod, &modules, list)
		if ((even_unformed || mod->state != MODULE_STATE_UNFORMED) && !strcmp(mod->name, name))
			return mod;
	return NULL;
}

struct module *find_module(const char *name)
{
	return find_module_all(name, false);
}

struct module *__module_address(unsigned long addr)
{
	enum mod_mem_type type;
	struct module *mod;

	list_for_each_entry(mod, &modules, list) {
		if (mod->state == MODULE_STATE_UNFORMED)
			continue;
		for (type = 0; type < MOD_MEM_NUM_TYPES; type++)
			if (within_module_mem_type(addr, mod, type))
				return mod;
	}
	return NULL;
}

struct module *__module_text_address(unsigned long addr)
{
	struct module *mod = __module_address(addr);

	if (mod && !within_module_mem_type(addr, mod, MOD_TEXT) &&
	    !within_module_mem_type(addr, mod, MOD_INIT_TEXT))
		return NULL;
	return mod;
}

bool is_module_text_address(unsigned long addr)
{
	return __module_text_address(addr) != NULL;
}

/* The entries aren't sorted: a module has few. */
const struct exception_table_entry *search_module_extables(unsigned long addr)
{
	struct module *mod = __module_address(addr);
	unsigned long i;

	for (i = 0; mod && i < mod->num_exentries; i++)
		if ((unsigned long)&mod->extable[i].insn + mod->extable[i].insn == addr)
			return &mod->extable[i];
	return NULL;
}
NOKPROBE_SYMBOL(search_module_extables);

/* Users */

bool try_module_get(struct module *module)
{
	int old = atomic_read(&module->refcnt);

	while (old && !__atomic_compare_exchange_n(&module->refcnt.counter, &old, old + 1, false,
						   __ATOMIC_SEQ_CST, __ATOMIC_RELAXED))
		;
	return old != 0;
}

void module_put(struct module *module)
{
	atomic_dec(&module->refcnt);
}

int module_refcount(struct module *mod)
{
	return atomic_read(&mod->refcnt) - MODULE_REF_BASE;
}

/* Nobody can get hold of it any more, unless somebody has already. */
static bool try_release_module_ref(struct module *mod)
{
	int old = MODULE_REF_BASE;

	return __atomic_compare_exchange_n(&mod->refcnt.counter, &old, 0, false, __ATOMIC_SEQ_CST,
					   __ATOMIC_RELAXED);
}

/* Unloading */

static void unlink_module(struct module *mod)
{
	mutex_lock(&module_mutex);
	list_del(&mod->list);
	mutex_unlock(&module_mutex);
}

static void free_memory_of(struct module *mod)
{
	struct module_memory data;

	kfree(mod->core_kallsyms);
	if (mod->kallsyms != mod->core_kallsyms)
		kfree(mod->kallsyms);
	free_module_memory(mod, MOD_INIT_TEXT);
	free_module_memory(mod, MOD_INIT_DATA);
	free_module_memory(mod, MOD_TEXT);
	/* The structure itself is part of the data. */
	data = mod->mem[MOD_DATA];
	host_hypercall(HYPERCALL_MODULE, MODULE_OP_FREE, 0, (unsigned long)data.base, 0);
}

static void free_module(struct module *mod)
{
	mod->state = MODULE_STATE_UNFORMED;
	module_unload_free(mod);
	unlink_module(mod);
	free_memory_of(mod);
}

static noinline int try_stop_module(const char *name, struct module **found)
{
	struct module *mod = find_module(name);

	if (!mod) {
		pr_info("%s: no such module is loaded\n", name);
		return -ENOENT;
	}
	if (!list_empty(&mod->source_list)) {
		pr_info("%s: in use by %s\n", name,
			list_first_entry(&mod->source_list, struct module_use, source_list)->source->name);
		return -EWOULDBLOCK;
	}
	if (mod->state != MODULE_STATE_LIVE) {
		pr_info("%s: its init function hasn't returned, or it is being unloaded\n", name);
		return -EBUSY;
	}
	if (mod->init && !mod->exit) {
		pr_info("%s: has no exit function\n", name);
		return -EBUSY;
	}
	if (!try_release_module_ref(mod)) {
		pr_info("%s: in use (%d)\n", name, module_refcount(mod));
		return -EWOULDBLOCK;
	}
	mod->state = MODULE_STATE_GOING;
	*found = mod;
	return 0;
}

SYSCALL_DEFINE2(delete_module, const char __user *, name_user, unsigned int, flags)
{
	char name[MODULE_NAME_LEN];
	struct module *mod = NULL;
	long len;
	int err;

	(void)flags;
	if (current_cred()->euid.val)
		return -EPERM;
	len = strncpy_from_user(name, name_user, MODULE_NAME_LEN);
	if (len < 0)
		return len;
	if (len == 0 || len == MODULE_NAME_LEN)
		return -ENOENT;
	mutex_lock(&module_mutex);
	err = try_stop_module(name, &mod);
	mutex_unlock(&module_mutex);
	if (err)
		return err;
	if (mod->exit)
		mod->exit();
	blocking_notifier_call_chain(&module_notify_list, MODULE_STATE_GOING, mod);
	free_module(mod);
	return 0;
}

/* Loading */

static int copy_module_from_user(const void __user *umod, unsigned long len, struct load_info *info)
{
	if (len < SELFMAG) {
		pr_err("module: %lu bytes are no ELF file\n", len);
		return -ENOEXEC;
	}
	info->len = len;
	info->hdr = kmalloc(len, GFP_KERNEL | __GFP_NOWARN);
	if (!info->hdr)
		return -ENOMEM;
	return copy_from_user(info->hdr, umod, len) ? -EFAULT : 0;
}

static int setup_load_info(struct load_info *info)
{
	const Elf_Shdr *shdr;

	info->index.mod = find_sec(info, ".gnu.linkonce.this_module");
	info->index.info = find_sec(info, ".modinfo");
	shdr = &info->sechdrs[info->index.mod];
	if (!info->index.mod || shdr->sh_type == SHT_NOBITS || shdr->sh_size != sizeof(struct module) ||
	    section_mem_type(info, shdr) != MOD_DATA || !(shdr->sh_flags & SHF_ALLOC)) {
		pr_err("module: no struct module of %zu bytes in section .gnu.linkonce.this_module\n",
		       sizeof(struct module));
		return -ENOEXEC;
	}
	info->name = ((struct module *)((char *)info->hdr + shdr->sh_offset))->name;
	if (!*info->name || strnlen(info->name, MODULE_NAME_LEN) == MODULE_NAME_LEN) {
		pr_err("module: it has no name\n");
		return -ENOEXEC;
	}
	/* Read now, and not kept. */
	info->sechdrs[info->index.info].sh_flags &= ~(unsigned long)SHF_ALLOC;
	return 0;
}

static int check_modinfo(const struct load_info *info)
{
	const char *magic = get_modinfo(info, "vermagic");
	u32 percpu = find_sec(info, ".data..percpu");

	if (!magic || strcmp(magic, VERMAGIC_STRING)) {
		pr_err("%s: version magic '%s' should be '%s'\n", info->name, magic ?: "", VERMAGIC_STRING);
		return -ENOEXEC;
	}
	if (percpu && info->sechdrs[percpu].sh_size) {
		pr_err("%s: has per-CPU variables, which only the kernel itself can have\n", info->name);
		return -ENOEXEC;
	}
	return 0;
}

/* The module at its final place, which the returned structure is a part of. */
static struct module *layout_and_allocate(struct load_info *info)
{
	const Elf_Shdr *shdr = &info->sechdrs[info->index.mod];
	struct module *tmp = (struct module *)((char *)info->hdr + shdr->sh_offset), *mod;
	enum mod_mem_type type;
	int err;

	memset(tmp->mem, 0, sizeof(tmp->mem));
	err = layout_sections(tmp, info);
	err = err ?: alloc_module_memory(tmp);
	if (err) {
		for (type = 0; type < MOD_MEM_NUM_TYPES; type++)
			free_module_memory(tmp, type);
		return ERR_PTR(err);
	}
	move_module(tmp, info);
	mod = (struct module *)shdr->sh_addr;
	memcpy(mod->mem, tmp->mem, sizeof(mod->mem));
	mod->kallsyms = mod->core_kallsyms = NULL;
	mod->state = MODULE_STATE_UNFORMED;
	INIT_LIST_HEAD(&mod->source_list);
	INIT_LIST_HEAD(&mod->target_list);
	atomic_set(&mod->refcnt, MODULE_REF_BASE + 1);
	return mod;
}

/* Linux: waits for another one's init of the same name. Deviates: nobody else can be loading. */
static int add_unformed_module(struct module *mod)
{
	struct module *old;
	int err = 0;

	mutex_lock(&module_mutex);
	old = find_module_all(mod->name, true);
	if (old) {
		err = old->state == MODULE_STATE_LIVE ? -EEXIST : -EBUSY;
		pr_info("%s: is loaded already\n", mod->name);
	} else {
		list_add(&mod->list, &modules);
	}
	mutex_unlock(&module_mutex);
	return err;
}

static void *section_objs(const struct load_info *info, const char *name, size_t size,
			  unsigned long *num)
{
	u32 i = find_sec(info, name);
	const Elf_Shdr *shdr = &info->sechdrs[i];

	*num = 0;
	if (!i || !(shdr->sh_flags & SHF_ALLOC))
		return NULL;
	*num = shdr->sh_size / size;
	return (void *)shdr->sh_addr;
}

#define SECTION_OBJS(name, ptr, num) ((ptr) = section_objs(info, name, sizeof(*(ptr)), &(num)))

static void find_module_sections(struct module *mod, const struct load_info *info)
{
	SECTION_OBJS("__ksymtab", mod->syms, mod->num_syms);
	SECTION_OBJS("__ex_table", mod->extable, mod->num_exentries);
	SECTION_OBJS(FTRACE_CALLSITE_SECTION, mod->ftrace_callsites, mod->num_ftrace_callsites);
	SECTION_OBJS("_kprobe_blacklist", mod->kprobe_blacklist, mod->num_kprobe_blacklist);
	SECTION_OBJS(".kprobes.text", mod->kprobes_text_start, mod->kprobes_text_size);
	SECTION_OBJS(".noinstr.text", mod->noinstr_text_start, mod->noinstr_text_size);
	module_find_bug_table(mod, info);
}

static int apply_relocations(struct module *mod, const struct load_info *info)
{
	int err = 0;
	u32 i;

	for (i = 1; i < info->hdr->e_shnum && !err; i++) {
		const Elf_Shdr *shdr = &info->sechdrs[i];

		if (shdr->sh_type == ELF_RELOCATIONS && info->sechdrs[shdr->sh_info].sh_flags & SHF_ALLOC)
			err = apply_relocations_of(mod, info, i);
	}
	return err;
}

static int post_relocation(struct module *mod, const struct load_info *info)
{
	mod->core_kallsyms = copy_kallsyms(info, true);
	mod->kallsyms = copy_kallsyms(info, false);
	if (!mod->core_kallsyms || !mod->kallsyms)
		return -ENOMEM;
	return place_module_text(mod);
}

/* From here on everybody can see it. */
static int complete_formation(struct module *mod)
{
	int err;

	mutex_lock(&module_mutex);
	err = verify_exported_symbols(mod);
	if (!err)
		mod->state = MODULE_STATE_COMING;
	mutex_unlock(&module_mutex);
	return err;
}

static void free_init(struct module *mod)
{
	struct mod_kallsyms *init_symbols = mod->kallsyms;

	mod->kallsyms = mod->core_kallsyms;
	kfree(init_symbols);
	free_module_memory(mod, MOD_INIT_TEXT);
	free_module_memory(mod, MOD_INIT_DATA);
}

static void abandon_module(struct module *mod)
{
	mod->state = MODULE_STATE_GOING;
	blocking_notifier_call_chain(&module_notify_list, MODULE_STATE_GOING, mod);
	free_module(mod);
}

static noinline int do_init_module(struct module *mod)
{
	int ret = mod->init ? mod->init() : 0;

	if (ret < 0) {
		pr_warn("%s: its init function returned %d\n", mod->name, ret);
		abandon_module(mod);
		return ret;
	}
	if (ret > 0)
		pr_warn("%s: its init function returned %d, neither 0 nor an error\n", mod->name, ret);
	mod->state = MODULE_STATE_LIVE;
	blocking_notifier_call_chain(&module_notify_list, MODULE_STATE_LIVE, mod);
	module_put(mod);
	free_init(mod);
	return 0;
}

/* From the parts in their places to a module that could run. */
static int form_module(struct module *mod, struct load_info *info)
{
	int err;

	find_module_sections(mod, info);
	err = simplify_symbols(mod, info);
	err = err ?: apply_relocations(mod, info);
	err = err ?: post_relocation(mod, info);
	return err ?: complete_formation(mod);
}

static noinline int load_module(struct load_info *info, struct module **loaded)
{
	struct module *mod;
	int err;

	err = elf_validity_check(info);
	err = err ?: setup_load_info(info);
	err = err ?: check_modinfo(info);
	if (err)
		return err;
	mod = layout_and_allocate(info);
	if (IS_ERR(mod))
		return (int)PTR_ERR(mod);
	err = add_unformed_module(mod);
	if (err) {
		free_memory_of(mod);
		return err;
	}
	err = form_module(mod, info);
	if (err) {
		free_module(mod);
		return err;
	}
	err = notifier_to_errno(
		blocking_notifier_call_chain(&module_notify_list, MODULE_STATE_COMING, mod));
	if (err) {
		abandon_module(mod);
		return err;
	}
	*loaded = mod;
	return 0;
}

SYSCALL_DEFINE3(init_module, void __user *, umod, unsigned long, len, const char __user *, uargs)
{
	struct load_info info = {};
	struct module *mod = NULL;
	int err;

	(void)uargs;
	if (current_cred()->euid.val)
		return -EPERM;
	err = copy_module_from_user(umod, len, &info);
	err = err ?: load_module(&info, &mod);
	kfree(info.hdr);
	return err ?: do_init_module(mod);
}
