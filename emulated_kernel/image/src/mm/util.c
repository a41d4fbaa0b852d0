// SPDX-License-Identifier: GPL-2.0-or-later
// Copies of strings and memory into kmalloc'ed memory.
#include "mm.h"
#include "printk.h"
#include "string.h"

char *kstrdup(const char *s, gfp_t gfp)
{
	return s ? kmemdup(s, strlen(s) + 1, gfp) : NULL;
}

char *kstrndup(const char *s, size_t max, gfp_t gfp)
{
	size_t len = strnlen(s, max);
	char *buf = kmalloc(len + 1, gfp);

	if (!buf)
		return NULL;
	memcpy(buf, s, len);
	buf[len] = '\0';
	return buf;
}

void *kmemdup(const void *src, size_t len, gfp_t gfp)
{
	void *p = kmalloc(len, gfp);

	if (p)
		memcpy(p, src, len);
	return p;
}

char *kasprintf(gfp_t gfp, const char *fmt, ...)
{
	va_list args, again;
	char *p;
	int len;

	va_start(args, fmt);
	va_copy(again, args);
	len = vsnprintf(NULL, 0, fmt, args);
	p = kmalloc(len + 1, gfp);
	if (p)
		vsnprintf(p, len + 1, fmt, again);
	va_end(again);
	va_end(args);
	return p;
}
