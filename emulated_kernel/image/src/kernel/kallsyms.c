// SPDX-License-Identifier: GPL-2.0-or-later
// Symbols: the image's own table, put there by the build after the first links.
#include "kallsyms.h"
#include "module.h"
#include "printk.h"
#include "string.h"

/* Offsets from _text, ascending; names are a length byte or two, a type letter and the name. */
extern const u32 kallsyms_num_syms __weak;
extern const s64 kallsyms_addresses[] __weak;
extern const u32 kallsyms_name_offsets[] __weak;
extern const u8 kallsyms_names[] __weak;

static const char *symbol_name(unsigned int i)
{
	return (const char *)kallsyms_names + kallsyms_name_offsets[i] + 1;
}

static bool is_ksym_addr(unsigned long addr)
{
	return addr >= (unsigned long)_stext && addr < (unsigned long)_end;
}

static unsigned int get_symbol_pos(unsigned long addr, unsigned long *size, unsigned long *offset)
{
	unsigned int low = 0, high = kallsyms_num_syms, mid, i;
	unsigned long start, end = (unsigned long)_end;

	while (high - low > 1) {
		mid = low + (high - low) / 2;
		if ((unsigned long)kallsyms_addresses[mid] <= addr)
			low = mid;
		else
			high = mid;
	}
	while (low && kallsyms_addresses[low - 1] == kallsyms_addresses[low])
		low--;
	start = kallsyms_addresses[low];
	for (i = low + 1; i < kallsyms_num_syms; i++) {
		if ((unsigned long)kallsyms_addresses[i] > start) {
			end = kallsyms_addresses[i];
			break;
		}
	}
	if (size)
		*size = end - start;
	if (offset)
		*offset = addr - start;
	return low;
}

unsigned long kallsyms_lookup_name(const char *name)
{
	unsigned int i;

	if (!*name)
		return 0;
	for (i = 0; i < kallsyms_num_syms; i++)
		if (!strcmp(symbol_name(i), name))
			return kallsyms_addresses[i];
	return module_kallsyms_lookup_name(name);
}

/* Of the image's own symbols the global ones: their letters are capitals. */
unsigned long kallsyms_lookup_exported(const char *name)
{
	unsigned int i;

	for (i = 0; i < kallsyms_num_syms; i++)
		if (isupper(symbol_name(i)[-1]) && !strcmp(symbol_name(i), name))
			return kallsyms_addresses[i];
	return 0;
}

int kallsyms_on_each_symbol(int (*fn)(void *data, const char *name, void *mod, unsigned long addr),
			    void *data)
{
	unsigned int i;
	int ret;

	for (i = 0; i < kallsyms_num_syms; i++) {
		ret = fn(data, symbol_name(i), NULL, kallsyms_addresses[i]);
		if (ret)
			return ret;
	}
	return 0;
}

int kallsyms_lookup_size_offset(unsigned long addr, unsigned long *size, unsigned long *offset)
{
	char namebuf[KSYM_NAME_LEN];

	if (!is_ksym_addr(addr))
		return module_address_lookup(addr, size, offset, NULL, namebuf) != NULL;
	get_symbol_pos(addr, size, offset);
	return 1;
}

const char *kallsyms_lookup(unsigned long addr, unsigned long *size, unsigned long *offset,
			    char **modname, char *namebuf)
{
	if (modname)
		*modname = NULL;
	if (!is_ksym_addr(addr))
		return module_address_lookup(addr, size, offset, modname, namebuf);
	strscpy(namebuf, symbol_name(get_symbol_pos(addr, size, offset)), KSYM_NAME_LEN);
	return namebuf;
}

static int __sprint_symbol(char *buffer, unsigned long address, int symbol_offset, bool add_offset)
{
	unsigned long offset, size;
	char *modname;
	int len;

	if (!kallsyms_lookup(address + symbol_offset, &size, &offset, &modname, buffer))
		return sprintf(buffer, "0x%lx", address);
	len = (int)strlen(buffer);
	if (add_offset)
		len += sprintf(buffer + len, "+%#lx/%#lx", offset - symbol_offset, size);
	if (modname)
		len += sprintf(buffer + len, " [%s]", modname);
	return len;
}

int sprint_symbol(char *buffer, unsigned long address)
{
	return __sprint_symbol(buffer, address, 0, true);
}

int sprint_symbol_no_offset(char *buffer, unsigned long address)
{
	return __sprint_symbol(buffer, address, 0, false);
}

int sprint_backtrace(char *buffer, unsigned long address)
{
	return __sprint_symbol(buffer, address, -1, true);
}
