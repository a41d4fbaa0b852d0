// SPDX-License-Identifier: GPL-2.0-or-later
// Formatted printing, with the kernel's pointer formats for symbols.
#include "kallsyms.h"
#include "printk.h"
#include "string.h"

#define FLAG_LEFT 1
#define FLAG_PLUS 2
#define FLAG_SPACE 4
#define FLAG_ALT 8
#define FLAG_ZERO 16
#define FLAG_SIGNED 32
#define FLAG_UPPER 64

struct printf_spec {
	int flags;
	int width;
	int precision; /* -1: none */
	int length;    /* bytes of the integer */
	int base;
};

/* Writes what fits and counts all. */
struct outbuf {
	char *buf;
	size_t size;
	size_t pos;
};

static __always_inline void put_char(struct outbuf *out, char c)
{
	if (out->pos < out->size)
		out->buf[out->pos] = c;
	out->pos++;
}

static void put_chars(struct outbuf *out, char c, int n)
{
	while (n-- > 0)
		put_char(out, c);
}

static void put_string(struct outbuf *out, const char *s, int len, const struct printf_spec *spec)
{
	int pad = spec->width - len;

	if (!(spec->flags & FLAG_LEFT))
		put_chars(out, ' ', pad);
	while (len-- > 0)
		put_char(out, *s++);
	if (spec->flags & FLAG_LEFT)
		put_chars(out, ' ', pad);
}

static char sign_char(unsigned long long *num, int flags)
{
	if (!(flags & FLAG_SIGNED))
		return 0;
	if ((long long)*num < 0) {
		*num = -*num;
		return '-';
	}
	if (flags & FLAG_PLUS)
		return '+';
	return flags & FLAG_SPACE ? ' ' : 0;
}

/* Digits in reverse order. */
static int number_digits(char *tmp, unsigned long long num, int base, int flags)
{
	const char *digits = flags & FLAG_UPPER ? "0123456789ABCDEF" : "0123456789abcdef";
	int i = 0;

	do {
		tmp[i++] = digits[num % base];
		num /= base;
	} while (num);
	return i;
}

static noinline void number(struct outbuf *out, unsigned long long num,
			    const struct printf_spec *spec)
{
	bool alt = spec->flags & FLAG_ALT && spec->base != 10 && (num || spec->base == 16);
	char sign = sign_char(&num, spec->flags);
	char tmp[24];
	int n = number_digits(tmp, num, spec->base, spec->flags);
	int zeros = max(spec->precision - n, 0);
	int width = spec->width - n - zeros - !!sign - (alt ? spec->base / 8 : 0);

	if (spec->flags & FLAG_ZERO && !(spec->flags & FLAG_LEFT) && spec->precision < 0) {
		zeros += max(width, 0);
		width = 0;
	}
	if (!(spec->flags & FLAG_LEFT))
		put_chars(out, ' ', width);
	if (sign)
		put_char(out, sign);
	if (alt) {
		put_char(out, '0');
		if (spec->base == 16)
			put_char(out, spec->flags & FLAG_UPPER ? 'X' : 'x');
	}
	put_chars(out, '0', zeros);
	while (n)
		put_char(out, tmp[--n]);
	if (spec->flags & FLAG_LEFT)
		put_chars(out, ' ', width);
}

static void symbol_string(struct outbuf *out, unsigned long addr, char kind,
			  const struct printf_spec *spec)
{
	char sym[KSYM_SYMBOL_LEN];

	if (kind == 's')
		sprint_symbol_no_offset(sym, addr);
	else if (kind == 'B')
		sprint_backtrace(sym, addr);
	else
		sprint_symbol(sym, addr);
	put_string(out, sym, (int)strlen(sym), spec);
}

/* Returns how many letters behind %p were used. */
static noinline int pointer(struct outbuf *out, const char *fmt, void *ptr, struct printf_spec *spec)
{
	switch (*fmt) {
	case 'S':
	case 's':
	case 'B':
		symbol_string(out, (unsigned long)ptr, *fmt, spec);
		return 1;
	default:
		spec->base = 16;
		spec->precision = -1;
		if (spec->width < 0 || !spec->width) {
			spec->width = 2 * (int)sizeof(void *);
			spec->flags |= FLAG_ZERO;
		}
		number(out, (unsigned long)ptr, spec);
		return *fmt == 'x' || *fmt == 'K';
	}
}

static const char *parse_flags(const char *fmt, struct printf_spec *spec)
{
	for (;; fmt++) {
		switch (*fmt) {
		case '-': spec->flags |= FLAG_LEFT; continue;
		case '+': spec->flags |= FLAG_PLUS; continue;
		case ' ': spec->flags |= FLAG_SPACE; continue;
		case '#': spec->flags |= FLAG_ALT; continue;
		case '0': spec->flags |= FLAG_ZERO; continue;
		}
		return fmt;
	}
}

static const char *parse_number(const char *fmt, int *value)
{
	for (*value = 0; isdigit(*fmt); fmt++)
		*value = *value * 10 + (*fmt - '0');
	return fmt;
}

static const char *parse_length(const char *fmt, struct printf_spec *spec)
{
	spec->length = 4;
	switch (*fmt) {
	case 'h':
		spec->length = fmt[1] == 'h' ? 1 : 2;
		return fmt + (fmt[1] == 'h' ? 2 : 1);
	case 'l':
		spec->length = fmt[1] == 'l' ? 8 : sizeof(long);
		return fmt + (fmt[1] == 'l' ? 2 : 1);
	case 'L':
		spec->length = 8;
		return fmt + 1;
	case 'z':
	case 't':
		spec->length = sizeof(size_t);
		return fmt + 1;
	}
	return fmt;
}

static unsigned long long truncate_to(unsigned long long num, const struct printf_spec *spec)
{
	int shift = 64 - 8 * spec->length;

	if (spec->flags & FLAG_SIGNED)
		return (unsigned long long)((long long)(num << shift) >> shift);
	return num << shift >> shift;
}

static bool integer_spec(char conversion, struct printf_spec *spec)
{
	switch (conversion) {
	case 'd':
	case 'i':
		spec->flags |= FLAG_SIGNED;
		fallthrough;
	case 'u':
		spec->base = 10;
		return true;
	case 'X':
		spec->flags |= FLAG_UPPER;
		fallthrough;
	case 'x':
		spec->base = 16;
		return true;
	case 'o':
		spec->base = 8;
		return true;
	}
	return false;
}

static noinline void string(struct outbuf *out, const char *s, const struct printf_spec *spec)
{
	if ((unsigned long)s < 4096)
		s = s ? "(efault)" : "(null)";
	put_string(out, s, (int)strnlen(s, spec->precision < 0 ? INT_MAX : spec->precision), spec);
}

/* va_list can't be passed by value and go on; a struct holds it. */
struct arg_list {
	va_list ap;
};

static const char *parse_width(const char *fmt, struct printf_spec *spec, struct arg_list *args)
{
	fmt = parse_flags(fmt, spec);
	if (*fmt == '*') {
		spec->width = va_arg(args->ap, int);
		if (spec->width < 0) {
			spec->width = -spec->width;
			spec->flags |= FLAG_LEFT;
		}
		fmt++;
	} else {
		fmt = parse_number(fmt, &spec->width);
	}
	if (*fmt != '.')
		return fmt;
	if (*++fmt == '*') {
		spec->precision = max(va_arg(args->ap, int), 0);
		return fmt + 1;
	}
	return parse_number(fmt, &spec->precision);
}

static noinline const char *convert(struct outbuf *out, const char *fmt, struct arg_list *args)
{
	struct printf_spec spec = { .precision = -1 };
	unsigned long long num;
	char c;

	fmt = parse_width(fmt, &spec, args);
	fmt = parse_length(fmt, &spec);
	switch (*fmt) {
	case '\0':
		return fmt;
	case '%':
		put_char(out, '%');
		return fmt + 1;
	case 'c':
		c = (char)va_arg(args->ap, int);
		put_string(out, &c, 1, &spec);
		return fmt + 1;
	case 's':
		string(out, va_arg(args->ap, const char *), &spec);
		return fmt + 1;
	case 'p':
		return fmt + 1 + pointer(out, fmt + 1, va_arg(args->ap, void *), &spec);
	}
	if (!integer_spec(*fmt, &spec)) {
		put_char(out, '%');
		return fmt;
	}
	num = spec.length == 8 ? va_arg(args->ap, unsigned long long) : va_arg(args->ap, unsigned int);
	number(out, truncate_to(num, &spec), &spec);
	return fmt + 1;
}

int vsnprintf(char *buf, size_t size, const char *fmt, va_list args)
{
	struct outbuf out = { buf, size, 0 };
	struct arg_list list;

	va_copy(list.ap, args);
	while (*fmt) {
		if (*fmt == '%')
			fmt = convert(&out, fmt + 1, &list);
		else
			put_char(&out, *fmt++);
	}
	va_end(list.ap);
	if (size)
		buf[min(out.pos, size - 1)] = '\0';
	return (int)out.pos;
}

int vscnprintf(char *buf, size_t size, const char *fmt, va_list args)
{
	int i = vsnprintf(buf, size, fmt, args);

	return i < (int)size ? i : max((int)size - 1, 0);
}

int snprintf(char *buf, size_t size, const char *fmt, ...)
{
	va_list args;
	int i;

	va_start(args, fmt);
	i = vsnprintf(buf, size, fmt, args);
	va_end(args);
	return i;
}

int scnprintf(char *buf, size_t size, const char *fmt, ...)
{
	va_list args;
	int i;

	va_start(args, fmt);
	i = vscnprintf(buf, size, fmt, args);
	va_end(args);
	return i;
}

int sprintf(char *buf, const char *fmt, ...)
{
	va_list args;
	int i;

	va_start(args, fmt);
	i = vsnprintf(buf, INT_MAX, fmt, args);
	va_end(args);
	return i;
}
