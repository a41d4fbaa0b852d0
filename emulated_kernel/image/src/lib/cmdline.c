// SPDX-License-Identifier: GPL-2.0-or-later
// Words of a command line: numbers in lists and ranges, sizes with a suffix, single words.
#include "string.h"

/* 0: no number; 1: a number; 2: a number and a comma behind it; 3: a range's begin. */
int get_option(char **str, int *pint)
{
	char *cur = *str;
	int value;

	if (!cur || !*cur)
		return 0;
	value = (int)simple_strtol(*cur == '-' ? cur + 1 : cur, str, 0);
	if (pint)
		*pint = *cur == '-' ? -value : value;
	if (*str == (*cur == '-' ? cur + 1 : cur))
		return 0;
	if (**str == ',') {
		(*str)++;
		return 2;
	}
	return **str == '-' ? 3 : 1;
}

/* ints[0] becomes how many there are; where it stopped is returned. */
char *get_options(const char *str, int nints, int *ints)
{
	char *cur = (char *)str;
	int i = 1, res;

	while (i < nints) {
		res = get_option(&cur, ints + i);
		if (!res)
			break;
		i++;
		if (res != 2)
			break;
	}
	ints[0] = i - 1;
	return cur;
}

unsigned long long memparse(const char *ptr, char **retptr)
{
	static const char suffixes[] = "kmgtpe";
	char *end;
	unsigned long long ret = simple_strtoull(ptr, &end, 0);
	const char *suffix = *end ? strchr(suffixes, tolower(*end)) : NULL;

	if (suffix) {
		ret <<= 10 * (suffix - suffixes + 1);
		end++;
	}
	if (retptr)
		*retptr = end;
	return ret;
}

static bool is_separator(char c)
{
	return !c || c == ',';
}

/* Whether the word stands alone in a list with commas. */
bool parse_option_str(const char *str, const char *option)
{
	size_t len = strlen(option);

	while (*str) {
		if (!strncmp(str, option, len) && is_separator(str[len]))
			return true;
		while (!is_separator(*str))
			str++;
		if (*str == ',')
			str++;
	}
	return false;
}
