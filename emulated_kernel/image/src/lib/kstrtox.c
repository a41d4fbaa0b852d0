// SPDX-License-Identifier: GPL-2.0-or-later
// Numbers in strings: the strict kstrto*() and the lax simple_strto*().
#include "errno.h"
#include "string.h"

static const char *parse_integer_fixup_radix(const char *s, unsigned int *base)
{
	if (*base == 0) {
		*base = 10;
		if (s[0] == '0')
			*base = tolower(s[1]) == 'x' && isxdigit(s[2]) ? 16 : 8;
	}
	if (*base == 16 && s[0] == '0' && tolower(s[1]) == 'x')
		s += 2;
	return s;
}

/* Digits used; bit 31: overflow. */
static unsigned int parse_integer(const char *s, unsigned int base, unsigned long long *p)
{
	unsigned long long res = 0;
	unsigned int used = 0, overflow = 0, digit;

	for (;; used++) {
		digit = isdigit(s[used]) ? (unsigned int)(s[used] - '0') :
			isalpha(s[used]) ? (unsigned int)(tolower(s[used]) - 'a' + 10) : 99;
		if (digit >= base)
			break;
		if (res > (ULLONG_MAX - digit) / base)
			overflow = 1U << 31;
		res = res * base + digit;
	}
	*p = res;
	return used | overflow;
}

unsigned long long simple_strtoull(const char *cp, char **endp, unsigned int base)
{
	unsigned long long result;

	cp = parse_integer_fixup_radix(cp, &base);
	cp += parse_integer(cp, base, &result) & ~(1U << 31);
	if (endp)
		*endp = (char *)cp;
	return result;
}

unsigned long simple_strtoul(const char *cp, char **endp, unsigned int base)
{
	return simple_strtoull(cp, endp, base);
}

long simple_strtol(const char *cp, char **endp, unsigned int base)
{
	if (*cp == '-')
		return -simple_strtoul(cp + 1, endp, base);
	return simple_strtoul(cp, endp, base);
}

static int _kstrtoull(const char *s, unsigned int base, unsigned long long *res)
{
	unsigned long long value;
	unsigned int rv;

	s = parse_integer_fixup_radix(s, &base);
	rv = parse_integer(s, base, &value);
	if (rv & (1U << 31))
		return -ERANGE;
	if (!rv)
		return -EINVAL;
	s += rv;
	if (*s == '\n')
		s++;
	if (*s)
		return -EINVAL;
	*res = value;
	return 0;
}

int kstrtoull(const char *s, unsigned int base, unsigned long long *res)
{
	if (s[0] == '+')
		s++;
	return _kstrtoull(s, base, res);
}

int kstrtoll(const char *s, unsigned int base, long long *res)
{
	unsigned long long tmp;
	int rv;

	if (s[0] != '-') {
		rv = kstrtoull(s, base, &tmp);
		if (!rv && tmp > (unsigned long long)LLONG_MAX)
			rv = -ERANGE;
	} else {
		rv = _kstrtoull(s + 1, base, &tmp);
		if (!rv && tmp > (unsigned long long)LLONG_MAX + 1)
			rv = -ERANGE;
		tmp = -tmp;
	}
	if (!rv)
		*res = (long long)tmp;
	return rv;
}

int kstrtouint(const char *s, unsigned int base, unsigned int *res)
{
	unsigned long long tmp;
	int rv = kstrtoull(s, base, &tmp);

	if (rv)
		return rv;
	if (tmp != (unsigned int)tmp)
		return -ERANGE;
	*res = (unsigned int)tmp;
	return 0;
}

int kstrtoint(const char *s, unsigned int base, int *res)
{
	long long tmp;
	int rv = kstrtoll(s, base, &tmp);

	if (rv)
		return rv;
	if (tmp != (int)tmp)
		return -ERANGE;
	*res = (int)tmp;
	return 0;
}

/* The narrower kinds: what doesn't fit is out of range. */
#define KSTRTO(name, type, wide, parse)                                    \
	int name(const char *s, unsigned int base, type *res)              \
	{                                                                  \
		wide tmp = 0;                                              \
		int rv = parse(s, base, &tmp);                             \
									   \
		if (rv < 0)                                                \
			return rv;                                         \
		if (tmp != (wide)(type)tmp)                                \
			return -ERANGE;                                    \
		*res = (type)tmp;                                          \
		return 0;                                                  \
	}
KSTRTO(kstrtoul, unsigned long, unsigned long long, kstrtoull)
KSTRTO(kstrtol, long, long long, kstrtoll)
KSTRTO(kstrtou16, u16, unsigned long long, kstrtoull)
KSTRTO(kstrtos16, s16, long long, kstrtoll)
KSTRTO(kstrtou8, u8, unsigned long long, kstrtoull)
KSTRTO(kstrtos8, s8, long long, kstrtoll)

int kstrtobool(const char *s, bool *res)
{
	if (!s)
		return -EINVAL;
	switch (tolower(s[0])) {
	case 'y':
	case 't':
	case '1':
		*res = true;
		return 0;
	case 'n':
	case 'f':
	case '0':
		*res = false;
		return 0;
	case 'o':
		if (tolower(s[1]) != 'n' && tolower(s[1]) != 'f')
			return -EINVAL;
		*res = tolower(s[1]) == 'n';
		return 0;
	}
	return -EINVAL;
}
