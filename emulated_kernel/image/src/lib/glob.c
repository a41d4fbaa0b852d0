// SPDX-License-Identifier: GPL-2.0-or-later
// Shell patterns: *, ?, classes in brackets, and backslash.
#include "string.h"

/* Whether c is in the class behind '['; *end: behind the ']', NULL where there is none. */
static bool match_class(const char *pat, unsigned char c, const char **end)
{
	bool inverted = *pat == '!', match = false;
	const char *class = pat + inverted;
	unsigned char a = *class++, b;

	*end = NULL;
	do {
		b = a;
		if (!a)
			return false;
		if (class[0] == '-' && class[1] != ']') {
			b = class[1];
			if (!b)
				return false;
			class += 2;
		}
		match |= a <= c && c <= b;
	} while ((a = *class++) != ']');
	*end = class;
	return match != inverted;
}

bool glob_match(const char *pat, const char *str)
{
	const char *back_pat = NULL, *back_str = NULL, *end;

	for (;;) {
		unsigned char c = *str++, d = *pat++;

		if (!c && (d == '?' || d == '['))
			return false;
		switch (d) {
		case '?':
			continue;
		case '*':
			if (!*pat)
				return true;
			back_pat = pat;
			back_str = --str;
			continue;
		case '[':
			if (match_class(pat, c, &end)) {
				pat = end;
				continue;
			}
			if (!end && c == '[')
				continue;
			break;
		case '\\':
			d = *pat++;
			fallthrough;
		default:
			if (c != d)
				break;
			if (!d)
				return true;
			continue;
		}
		if (!c || !back_pat)
			return false;
		pat = back_pat;
		str = ++back_str;
	}
}
