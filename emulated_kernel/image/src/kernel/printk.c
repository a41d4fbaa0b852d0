// SPDX-License-Identifier: GPL-2.0-or-later
// printk: messages with a level and a time in a ring that the host reads.
#include "atomic.h"
#include "host_abi.h"
#include "printk.h"
#include "sched.h"
#include "spinlock.h"
#include "string.h"
#include "timer.h"

#define MESSAGE_LOGLEVEL_DEFAULT 4

char __log_buf[LOG_BUF_SIZE] __aligned(8);
u64 log_first_seq;
u64 log_next_seq;
u32 log_first_idx;
u32 log_next_idx;
static DEFINE_SPINLOCK(logbuf_lock);

static struct printk_record *log_record(u32 idx)
{
	return (struct printk_record *)(__log_buf + idx);
}

static u32 log_next(u32 idx)
{
	struct printk_record *r = log_record(idx);
	u32 next = idx + r->size;

	if (next + sizeof(*r) > LOG_BUF_SIZE || !log_record(next)->size)
		return next == log_next_idx ? next : 0;
	return next;
}

/* Space from the next to the first record; one record header is always kept free. */
static bool log_has_space(u32 size)
{
	u32 free;

	if (log_next_idx > log_first_idx || log_first_seq == log_next_seq)
		free = max(LOG_BUF_SIZE - log_next_idx, (unsigned long)log_first_idx);
	else
		free = log_first_idx - log_next_idx;
	return free >= size + sizeof(struct printk_record);
}

static void log_make_free_space(u32 size)
{
	while (log_first_seq < log_next_seq && !log_has_space(size)) {
		log_first_idx = log_next(log_first_idx);
		log_first_seq++;
	}
	if (log_first_seq == log_next_seq && !log_has_space(size))
		log_first_idx = log_next_idx = 0;
}

static noinline void log_store(int level, const char *text, u16 text_len)
{
	u32 size = ALIGN((u32)sizeof(struct printk_record) + text_len, 8);
	struct printk_record *r;

	log_make_free_space(size);
	if (log_next_idx + size + sizeof(*r) > LOG_BUF_SIZE) {
		memset(log_record(log_next_idx), 0, sizeof(*r));
		log_next_idx = 0;
	}
	r = log_record(log_next_idx);
	r->seq = log_next_seq;
	r->ts_ns = local_clock();
	r->size = (u16)size;
	r->text_len = text_len;
	r->level = (u8)level;
	memcpy(r->text, text, text_len);
	log_next_idx += size;
	log_next_seq++;
}

static const char *printk_parse_prefix(const char *text, int *level)
{
	while (text[0] == '\001' && text[1]) {
		if (text[1] >= '0' && text[1] <= '7')
			*level = text[1] - '0';
		text += 2;
	}
	return text;
}

int vprintk_store(int level, const char *fmt, va_list args)
{
	char textbuf[LOG_LINE_MAX + 1];
	unsigned long flags;
	const char *text;
	size_t len;

	/* A bad argument faults here, where no lock is held yet. */
	vscnprintf(textbuf, sizeof(textbuf), fmt, args);
	text = printk_parse_prefix(textbuf, &level);
	len = strlen(text);
	if (len && text[len - 1] == '\n')
		len--;
	spin_lock_irqsave(&logbuf_lock, flags);
	log_store(level, text, (u16)len);
	spin_unlock_irqrestore(&logbuf_lock, flags);
	return (int)len;
}

static u32 console_locked;

noinline int console_trylock(void)
{
	return !xchg_u32(&console_locked, 1);
}

/* No console is registered: the host reads the log itself. */
noinline void console_unlock(void)
{
	WRITE_ONCE(console_locked, 0);
}

noinline int vprintk(const char *fmt, va_list args)
{
	int len = vprintk_store(MESSAGE_LOGLEVEL_DEFAULT, fmt, args);

	if (console_trylock())
		console_unlock();
	return len;
}

int _printk(const char *fmt, ...)
{
	va_list args;
	int r;

	va_start(args, fmt);
	r = vprintk(fmt, args);
	va_end(args);
	return r;
}

/* The host stops the machine; it reads the message from the argument. */
void panic(const char *fmt, ...)
{
	static char buf[256];
	va_list args;

	local_irq_disable();
	preempt_disable();
	va_start(args, fmt);
	vscnprintf(buf, sizeof(buf), fmt, args);
	va_end(args);
	pr_emerg("Kernel panic - not syncing: %s\n", buf);
	for (;;)
		host_hypercall(HYPERCALL_PANIC, (unsigned long)buf, 0, 0, 0);
}
