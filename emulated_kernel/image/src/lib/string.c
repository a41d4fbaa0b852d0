// SPDX-License-Identifier: GPL-2.0-or-later
// Strings and memory, byte by byte; copies and fills are in the architecture's lib/.
#include "errno.h"
#include "printk.h"
#include "string.h"

int memcmp(const void *a, const void *b, size_t n)
{
	const unsigned char *p = a, *q = b;

	for (; n; p++, q++, n--)
		if (*p != *q)
			return *p - *q;
	return 0;
}

void *memchr(const void *s, int c, size_t n)
{
	const unsigned char *p = s;

	for (; n; p++, n--)
		if (*p == (unsigned char)c)
			return (void *)p;
	return NULL;
}

void *memscan(void *addr, int c, size_t size)
{
	unsigned char *p = addr;

	for (; size && *p != (unsigned char)c; size--)
		p++;
	return p;
}

void *memchr_inv(const void *start, int c, size_t bytes)
{
	const unsigned char *p = start;

	for (; bytes; p++, bytes--)
		if (*p != (unsigned char)c)
			return (void *)p;
	return NULL;
}

size_t strlen(const char *s)
{
	const char *p = s;

	while (*p)
		p++;
	return p - s;
}

size_t strnlen(const char *s, size_t max)
{
	const char *p = s;

	while (max-- && *p)
		p++;
	return p - s;
}

int strcmp(const char *a, const char *b)
{
	unsigned char c, d;

	do {
		c = *a++;
		d = *b++;
		if (c != d)
			return c < d ? -1 : 1;
	} while (c);
	return 0;
}

int strncmp(const char *a, const char *b, size_t n)
{
	unsigned char c, d;

	while (n--) {
		c = *a++;
		d = *b++;
		if (c != d)
			return c < d ? -1 : 1;
		if (!c)
			break;
	}
	return 0;
}

int strcasecmp(const char *a, const char *b)
{
	int c, d;

	do {
		c = tolower(*a++);
		d = tolower(*b++);
	} while (c == d && c);
	return c - d;
}

int strncasecmp(const char *a, const char *b, size_t n)
{
	unsigned char c = 0, d = 0;

	while (n--) {
		c = tolower(*a++);
		d = tolower(*b++);
		if (c != d || !c)
			break;
	}
	return (int)c - (int)d;
}

char *strcpy(char *dest, const char *src)
{
	char *p = dest;

	while ((*p++ = *src++))
		;
	return dest;
}

char *strncpy(char *dest, const char *src, size_t n)
{
	char *p = dest;

	for (; n; n--) {
		if ((*p++ = *src))
			src++;
	}
	return dest;
}

char *strcat(char *dest, const char *src)
{
	strcpy(dest + strlen(dest), src);
	return dest;
}

char *strncat(char *dest, const char *src, size_t n)
{
	char *p = dest + strlen(dest);

	for (; n && *src; n--)
		*p++ = *src++;
	*p = '\0';
	return dest;
}

size_t strlcpy(char *dest, const char *src, size_t size)
{
	size_t ret = strlen(src), len;

	if (size) {
		len = min(ret, size - 1);
		memcpy(dest, src, len);
		dest[len] = '\0';
	}
	return ret;
}

size_t strlcat(char *dest, const char *src, size_t count)
{
	size_t len = strnlen(dest, count);

	if (len == count)
		return len + strlen(src);
	return len + strlcpy(dest + len, src, count - len);
}

ssize_t strscpy(char *dest, const char *src, size_t count)
{
	size_t i;

	if (!count || count > INT_MAX)
		return -E2BIG;
	for (i = 0; i < count; i++) {
		dest[i] = src[i];
		if (!src[i])
			return i;
	}
	dest[count - 1] = '\0';
	return -E2BIG;
}

char *strchr(const char *s, int c)
{
	for (; *s != (char)c; s++)
		if (!*s)
			return NULL;
	return (char *)s;
}

char *strchrnul(const char *s, int c)
{
	while (*s && *s != (char)c)
		s++;
	return (char *)s;
}

char *strnchr(const char *s, size_t count, int c)
{
	for (; count--; s++) {
		if (*s == (char)c)
			return (char *)s;
		if (!*s)
			break;
	}
	return NULL;
}

char *strrchr(const char *s, int c)
{
	const char *last = NULL;

	do {
		if (*s == (char)c)
			last = s;
	} while (*s++);
	return (char *)last;
}

char *strnstr(const char *s1, const char *s2, size_t len)
{
	size_t l2 = strlen(s2);

	for (; len >= l2; len--, s1++)
		if (!memcmp(s1, s2, l2))
			return (char *)s1;
	return NULL;
}

char *strstr(const char *s1, const char *s2)
{
	return strnstr(s1, s2, strlen(s1));
}

size_t strspn(const char *s, const char *accept)
{
	const char *p = s;

	while (*p && strchr(accept, *p))
		p++;
	return p - s;
}

size_t strcspn(const char *s, const char *reject)
{
	const char *p = s;

	while (*p && !strchr(reject, *p))
		p++;
	return p - s;
}

char *strpbrk(const char *cs, const char *ct)
{
	cs += strcspn(cs, ct);
	return *cs ? (char *)cs : NULL;
}

char *strsep(char **s, const char *ct)
{
	char *begin = *s, *end;

	if (!begin)
		return NULL;
	end = strpbrk(begin, ct);
	if (end)
		*end++ = '\0';
	*s = end;
	return begin;
}

char *skip_spaces(const char *str)
{
	while (isspace(*str))
		str++;
	return (char *)str;
}

char *strim(char *s)
{
	size_t size = strlen(s);

	while (size && isspace(s[size - 1]))
		size--;
	s[size] = '\0';
	return skip_spaces(s);
}

bool sysfs_streq(const char *s1, const char *s2)
{
	while (*s1 && *s1 == *s2) {
		s1++;
		s2++;
	}
	if (*s1 == *s2)
		return true;
	if (!*s1 && *s2 == '\n' && !s2[1])
		return true;
	return *s1 == '\n' && !s1[1] && !*s2;
}

int match_string(const char *const *array, size_t n, const char *string)
{
	size_t i;

	for (i = 0; i < n && array[i]; i++)
		if (!strcmp(array[i], string))
			return (int)i;
	return -EINVAL;
}

char *strnchrnul(const char *s, size_t count, int c)
{
	while (count-- && *s && *s != (char)c)
		s++;
	return (char *)s;
}

/* Where the string ends. */
char *strreplace(char *s, char old, char new)
{
	for (; *s; s++)
		if (*s == old)
			*s = new;
	return s;
}
