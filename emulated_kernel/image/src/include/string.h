/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Strings, memory, numbers in strings, and the other small helpers of lib/. */
#ifndef _STRING_H
#define _STRING_H

#include "types.h"

void *memcpy(void *dest, const void *src, size_t n);
void *memmove(void *dest, const void *src, size_t n);
void *memset(void *s, int c, size_t n);
int memcmp(const void *a, const void *b, size_t n);
void *memchr(const void *s, int c, size_t n);
void *memscan(void *addr, int c, size_t size);
void *memchr_inv(const void *start, int c, size_t bytes);
size_t strlen(const char *s);
size_t strnlen(const char *s, size_t max);
int strcmp(const char *a, const char *b);
int strncmp(const char *a, const char *b, size_t n);
int strcasecmp(const char *a, const char *b);
int strncasecmp(const char *a, const char *b, size_t n);
char *strcpy(char *dest, const char *src);
char *strncpy(char *dest, const char *src, size_t n);
char *strcat(char *dest, const char *src);
char *strncat(char *dest, const char *src, size_t n);
size_t strlcpy(char *dest, const char *src, size_t size);
size_t strlcat(char *dest, const char *src, size_t count);
ssize_t strscpy(char *dest, const char *src, size_t count);
char *strchr(const char *s, int c);
char *strchrnul(const char *s, int c);
char *strnchr(const char *s, size_t count, int c);
char *strrchr(const char *s, int c);
char *strstr(const char *s1, const char *s2);
char *strnstr(const char *s1, const char *s2, size_t len);
char *strpbrk(const char *cs, const char *ct);
size_t strspn(const char *s, const char *accept);
size_t strcspn(const char *s, const char *reject);
char *strsep(char **s, const char *ct);
char *strim(char *s);
char *strnchrnul(const char *s, size_t count, int c);
char *strreplace(char *s, char old, char new);
char *skip_spaces(const char *str);
bool sysfs_streq(const char *s1, const char *s2);
int match_string(const char *const *array, size_t n, const char *string);
char *kstrdup(const char *s, gfp_t gfp);
char *kstrndup(const char *s, size_t max, gfp_t gfp);
void *kmemdup(const void *src, size_t len, gfp_t gfp);

unsigned long simple_strtoul(const char *cp, char **endp, unsigned int base);
long simple_strtol(const char *cp, char **endp, unsigned int base);
unsigned long long simple_strtoull(const char *cp, char **endp, unsigned int base);
int kstrtoull(const char *s, unsigned int base, unsigned long long *res);
int kstrtoll(const char *s, unsigned int base, long long *res);
int kstrtoint(const char *s, unsigned int base, int *res);
int kstrtouint(const char *s, unsigned int base, unsigned int *res);
int kstrtoul(const char *s, unsigned int base, unsigned long *res);
int kstrtol(const char *s, unsigned int base, long *res);
int kstrtou16(const char *s, unsigned int base, u16 *res);
int kstrtos16(const char *s, unsigned int base, s16 *res);
int kstrtou8(const char *s, unsigned int base, u8 *res);
int kstrtos8(const char *s, unsigned int base, s8 *res);
int kstrtobool(const char *s, bool *res);
int get_option(char **str, int *pint);
char *get_options(const char *str, int nints, int *ints);
unsigned long long memparse(const char *ptr, char **retptr);
bool parse_option_str(const char *str, const char *option);
int base64_encode(const u8 *src, int srclen, char *dst);
int base64_decode(const char *src, int srclen, u8 *dst);

int hex_to_bin(unsigned char ch);
int hex2bin(u8 *dst, const char *src, size_t count);
char *bin2hex(char *dst, const void *src, size_t count);
int hex_dump_to_buffer(const void *buf, size_t len, int rowsize, int groupsize, char *linebuf,
		       size_t linebuflen, bool ascii);

extern const unsigned char _ctype[];
#define _U 0x01
#define _L 0x02
#define _D 0x04
#define _C 0x08
#define _P 0x10
#define _S 0x20
#define _X 0x40
#define _SP 0x80
#define __ismask(c) (_ctype[(unsigned char)(c)])
#define isdigit(c) ((unsigned int)((c) - '0') < 10)
#define isxdigit(c) ((__ismask(c) & (_D | _X)) != 0)
#define isspace(c) ((__ismask(c) & _S) != 0)
#define isalpha(c) ((__ismask(c) & (_U | _L)) != 0)
#define isalnum(c) ((__ismask(c) & (_U | _L | _D)) != 0)
#define isupper(c) ((__ismask(c) & _U) != 0)
#define islower(c) ((__ismask(c) & _L) != 0)
#define isprint(c) ((__ismask(c) & (_P | _U | _L | _D | _SP)) != 0)

static __always_inline int tolower(int c)
{
	return isupper(c) ? c + ('a' - 'A') : c;
}

static __always_inline int toupper(int c)
{
	return islower(c) ? c - ('a' - 'A') : c;
}

typedef int (*cmp_func_t)(const void *a, const void *b);
typedef void (*swap_func_t)(void *a, void *b, int size);
void sort(void *base, size_t num, size_t size, cmp_func_t cmp_func, swap_func_t swap_func);
void *bsearch(const void *key, const void *base, size_t num, size_t size, cmp_func_t cmp);
u32 crc32_le(u32 crc, const unsigned char *p, size_t len);
u32 crc32_be(u32 crc, const unsigned char *p, size_t len);
unsigned long int_sqrt(unsigned long x);
unsigned long gcd(unsigned long a, unsigned long b);
unsigned long lcm(unsigned long a, unsigned long b);
bool glob_match(const char *pat, const char *str);
unsigned int full_name_hash(const void *salt, const char *name, unsigned int len);

#endif
