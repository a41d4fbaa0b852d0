/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Kernel messages and formatted printing. */
#ifndef _PRINTK_H
#define _PRINTK_H

#include "types.h"

#define KERN_SOH "\001"
#define KERN_EMERG KERN_SOH "0"
#define KERN_ALERT KERN_SOH "1"
#define KERN_CRIT KERN_SOH "2"
#define KERN_ERR KERN_SOH "3"
#define KERN_WARNING KERN_SOH "4"
#define KERN_NOTICE KERN_SOH "5"
#define KERN_INFO KERN_SOH "6"
#define KERN_DEBUG KERN_SOH "7"
#define KERN_DEFAULT ""

/* One message in __log_buf; records are 8-byte aligned and never wrap around the end. */
struct printk_record {
	u64 seq;
	u64 ts_ns;
	u16 size;     /* bytes from this record to the next one; 0: the next one is at offset 0 */
	u16 text_len; /* bytes of text[], without a final newline */
	u8 level;
	u8 reserved[3];
	char text[];
};

#define LOG_BUF_SIZE (1UL << 17)
#define LOG_LINE_MAX 1000

int _printk(const char *fmt, ...) __printf(1, 2) __cold;
int console_trylock(void);
void console_unlock(void);
int vprintk(const char *fmt, va_list args);
int vprintk_store(int level, const char *fmt, va_list args);
#define printk(fmt, ...) _printk(fmt, ##__VA_ARGS__)
#ifndef pr_fmt
#define pr_fmt(fmt) fmt
#endif
#define pr_emerg(fmt, ...) printk(KERN_EMERG pr_fmt(fmt), ##__VA_ARGS__)
#define pr_alert(fmt, ...) printk(KERN_ALERT pr_fmt(fmt), ##__VA_ARGS__)
#define pr_err(fmt, ...) printk(KERN_ERR pr_fmt(fmt), ##__VA_ARGS__)
#define pr_warn(fmt, ...) printk(KERN_WARNING pr_fmt(fmt), ##__VA_ARGS__)
#define pr_notice(fmt, ...) printk(KERN_NOTICE pr_fmt(fmt), ##__VA_ARGS__)
#define pr_info(fmt, ...) printk(KERN_INFO pr_fmt(fmt), ##__VA_ARGS__)

int vsnprintf(char *buf, size_t size, const char *fmt, va_list args);
int vscnprintf(char *buf, size_t size, const char *fmt, va_list args);
int snprintf(char *buf, size_t size, const char *fmt, ...) __printf(3, 4);
int scnprintf(char *buf, size_t size, const char *fmt, ...) __printf(3, 4);
int sprintf(char *buf, const char *fmt, ...) __printf(2, 3);
char *kasprintf(gfp_t gfp, const char *fmt, ...) __printf(2, 3);

void panic(const char *fmt, ...) __printf(1, 2) __noreturn __cold;

#endif
