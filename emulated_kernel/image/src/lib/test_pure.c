// SPDX-License-Identifier: GPL-2.0-or-later
// Functions of lib/ with bytes in and bytes out: what takes or gives 64-bit numbers, structures or
// pointers can be called and compared in one way on every machine. Each returns how much it wrote.
#include "bitmap.h"
#include "hash.h"
#include "kfifo.h"
#include "math64.h"
#include "mm.h"
#include "printk.h"
#include "random.h"
#include "rbtree.h"
#include "sha256.h"
#include "string.h"
#include "timer.h"
#include "xarray.h"

struct writer {
	u8 *out;
	int at;
};

static noinline void put(struct writer *w, u64 value)
{
	int i;

	for (i = 0; i < 8; i++)
		w->out[w->at++] = (u8)(value >> 8 * i);
}

static u64 get(const u8 *in)
{
	u64 value = 0;
	int i;

	for (i = 0; i < 8; i++)
		value |= (u64)in[i] << 8 * i;
	return value;
}

/* In: three numbers. */
int test_math64(const u8 *in, unsigned int len __attribute__((unused)), u8 *out)
{
	struct writer w = { out, 0 };
	u64 a = get(in), b = get(in + 8) | 1, c = get(in + 16) | 1, rem;
	u32 rem32;
	s32 srem;

	put(&w, div64_u64(a, b));
	put(&w, div64_u64_rem(a, c, &rem));
	put(&w, rem);
	put(&w, div_u64_rem(a, (u32)b, &rem32));
	put(&w, rem32);
	put(&w, (u64)div64_s64((s64)a >> 1, (s64)b));
	put(&w, (u64)div_s64_rem((s64)a >> 1, (s32)c, &srem));
	put(&w, (u64)srem);
	put(&w, mul_u64_u64_div_u64(a, b, c));
	put(&w, mul_u64_u32_shr(a, (u32)b, (unsigned int)(c & 31)));
	put(&w, iter_div_u64_rem(a % (c * 7 | 1) % ((b & UINT_MAX) * 9), (u32)b, &rem));
	put(&w, rem);
	put(&w, int_sqrt64(a));
	put(&w, int_pow(b, (unsigned int)(c & 63)));
	put(&w, __sw_hweight64(a));
	put(&w, reciprocal_divide((u32)a, reciprocal_value((u32)b)));
	put(&w, a << (c & 63) | a >> (b & 63));
	put(&w, (u64)((s64)a >> (c & 63)));
	return w.at;
}

/* In: a key of 16 bytes, then data. */
int test_hashes(const u8 *in, unsigned int len, u8 *out)
{
	struct writer w = { out, 0 };
	siphash_key_t key = { { get(in), get(in + 8) } };
	const u8 *data = in + 16;
	size_t size = len - 16;

	put(&w, siphash(data, size, &key));
	put(&w, xxh64(data, size, key.key[0]));
	put(&w, xxh32(data, size, (u32)key.key[0]));
	put(&w, crc64_be(key.key[1], data, size));
	put(&w, hash_64(key.key[0], 1 + (key.key[1] & 31)));
	put(&w, hash_32((u32)key.key[0], 1 + (key.key[1] & 31)));
	return w.at;
}

/* In: a seed. */
int test_random(const u8 *in, unsigned int len __attribute__((unused)), u8 *out)
{
	struct writer w = { out, 0 };
	struct rnd_state state;
	int i;

	prandom_seed_state(&state, get(in));
	for (i = 0; i < 16; i++)
		put(&w, prandom_u32_state(&state));
	prandom_bytes_state(&state, out + w.at, 21);
	return w.at + 21;
}

/* In: a time in nanoseconds, and a date of six bytes. */
int test_time(const u8 *in, unsigned int len __attribute__((unused)), u8 *out)
{
	struct writer w = { out, 0 };
	struct timespec64 ts = ns_to_timespec64((s64)get(in));
	const u8 *date = in + 8;

	put(&w, (u64)ts.tv_sec);
	put(&w, (u64)ts.tv_nsec);
	put(&w, nsecs_to_jiffies64(get(in)));
	put(&w, (u64)mktime64(1970 + date[0], 1 + date[1] % 12, 1 + date[2] % 31, date[3] % 24, date[4] % 60,
			      date[5] % 60));
	return w.at;
}

/* In: data, hashed in steps whose length the data tells. */
int test_sha256_steps(const u8 *in, unsigned int len, u8 *out)
{
	struct sha256_state state;
	unsigned int at = 0, step;

	sha256_init(&state);
	while (at < len) {
		step = min(1 + in[at] % 90U, len - at);
		sha256_update(&state, in + at, step);
		at += step;
	}
	sha256_final(&state, out);
	return 32;
}

/* In: sizes of rows, of groups, of the line; whether there is text; then data. */
int test_hexdump(const u8 *in, unsigned int len, u8 *out)
{
	struct writer w = { out, 0 };

	put(&w, (u64)hex_dump_to_buffer(in + 4, len - 4, in[0] & 1 ? 16 : 32, in[1] % 10, (char *)out + 8,
					in[2], in[3] & 1));
	return w.at;
}

/* In: a string. Parsed by all that parse numbers of a fixed width, in all bases that have a name. */
int test_parse(const u8 *in, unsigned int len __attribute__((unused)), u8 *out)
{
	static const unsigned int bases[] = { 0, 8, 10, 16 };
	struct writer w = { out, 0 };
	const char *s = (const char *)in;
	unsigned long long ull = 0;
	long long ll = 0;
	unsigned int i, u = 0;
	char *end;
	u16 u_16 = 0;
	s16 s_16 = 0;
	u8 u_8 = 0;
	s8 s_8 = 0;
	int n = 0;

	for (i = 0; i < ARRAY_SIZE(bases); i++) {
		put(&w, (u64)kstrtoull(s, bases[i], &ull));
		put(&w, ull);
		put(&w, (u64)kstrtoll(s, bases[i], &ll));
		put(&w, (u64)ll);
		put(&w, (u64)kstrtouint(s, bases[i], &u));
		put(&w, u);
		put(&w, (u64)kstrtoint(s, bases[i], &n));
		put(&w, (u64)n);
		put(&w, (u64)kstrtou16(s, bases[i], &u_16));
		put(&w, (u64)kstrtos16(s, bases[i], &s_16));
		put(&w, (u64)kstrtou8(s, bases[i], &u_8));
		put(&w, (u64)kstrtos8(s, bases[i], &s_8));
		put(&w, (u64)u_16 << 32 | (u16)s_16 << 16 | u_8 << 8 | (u8)s_8);
		put(&w, simple_strtoull(s, &end, bases[i]));
		put(&w, (u64)(end - s));
	}
	put(&w, memparse(s, &end));
	put(&w, (u64)(end - s));
	return w.at;
}

/* In: a string. Split at commas and spaces, then taken for a list of numbers. */
int test_split(const u8 *in, unsigned int len, u8 *out)
{
	struct writer w = { out, 0 };
	char *copy = kmemdup(in, len, GFP_KERNEL), *rest = copy, *word;
	int ints[8] = { 0 }, i;

	if (!copy)
		return 0;
	while ((word = strsep(&rest, ", ")))
		put(&w, (u64)(word - copy) << 32 | strlen(word));
	memcpy(copy, in, len);
	put(&w, (u64)(get_options(copy, ARRAY_SIZE(ints), ints) - copy));
	for (i = 0; i < (int)ARRAY_SIZE(ints); i++)
		put(&w, (u64)ints[i]);
	kfree(copy);
	return w.at;
}

struct tree_entry {
	struct rb_node node;
	u8 key;
	bool used;
};

static void tree_insert(struct rb_root *root, struct tree_entry *entry)
{
	struct rb_node **link = &root->rb_node, *parent = NULL;

	while (*link) {
		parent = *link;
		link = entry->key < rb_entry(parent, struct tree_entry, node)->key ? &parent->rb_left :
										       &parent->rb_right;
	}
	rb_link_node(&entry->node, parent, link);
	rb_insert_color(&entry->node, root);
}

/* A byte a node, with its colour above the key's bits, and a zero for none: the whole shape. */
static void tree_shape(struct writer *w, const struct rb_node *node)
{
	if (!node) {
		w->out[w->at++] = 0;
		return;
	}
	w->out[w->at++] = (u8)(1 + rb_entry(node, struct tree_entry, node)->key +
			       (node->__rb_parent_color & 1 ? 128 : 0));
	tree_shape(w, node->rb_left);
	tree_shape(w, node->rb_right);
}

/* In: keys below 64; each goes in, or out where it is in already. */
int test_rbtree(const u8 *in, unsigned int len, u8 *out)
{
	struct tree_entry *entries = kcalloc(64, sizeof(*entries), GFP_KERNEL), *entry;
	struct rb_root root = RB_ROOT;
	struct writer w = { out, 0 };
	struct rb_node *node;
	unsigned int i;

	for (i = 0; entries && i < len; i++) {
		entry = &entries[in[i] % 64];
		entry->key = in[i] % 64;
		if (entry->used)
			rb_erase(&entry->node, &root);
		else
			tree_insert(&root, entry);
		entry->used = !entry->used;
	}
	for (node = rb_first(&root); node; node = rb_next(node))
		out[w.at++] = rb_entry(node, struct tree_entry, node)->key;
	for (node = rb_last(&root); node; node = rb_prev(node))
		out[w.at++] = rb_entry(node, struct tree_entry, node)->key;
	tree_shape(&w, root.rb_node);
	kfree(entries);
	return w.at;
}

struct sorted_entry {
	struct list_head list;
	struct hlist_node hash;
	u8 key, place;
};

static int cmp_keys(void *priv __attribute__((unused)), const struct list_head *a,
		    const struct list_head *b)
{
	return list_entry(a, struct sorted_entry, list)->key > list_entry(b, struct sorted_entry, list)->key;
}

/* In: keys. Out: their places in the sorted list, then chain by chain as a hash table finds them. */
int test_lists(const u8 *in, unsigned int len, u8 *out)
{
	struct sorted_entry *entries = kcalloc(len + 1, sizeof(*entries), GFP_KERNEL), *entry;
	DECLARE_HASHTABLE(table, 4) = { { NULL } };
	LIST_HEAD(head);
	unsigned int i, key;
	int at = 0;

	for (i = 0; entries && i < len; i++) {
		entries[i].key = in[i];
		entries[i].place = (u8)i;
		list_add_tail(&entries[i].list, &head);
		hash_add(table, &entries[i].hash, in[i] % 32);
	}
	list_sort(NULL, &head, cmp_keys);
	list_for_each_entry(entry, &head, list)
		out[at++] = entry->place;
	for (key = 0; key < 32; key++)
		hash_for_each_possible(table, entry, hash, key)
			out[at++] = entry->place;
	kfree(entries);
	return at;
}

/* In: operations of two bytes: how many, in or out or a look. */
int test_kfifo(const u8 *in, unsigned int len, u8 *out)
{
	struct __kfifo fifo;
	u8 buffer[3 * 64];
	unsigned int i, n, k;
	int at = 0;

	if (__kfifo_alloc(&fifo, 24, 3, GFP_KERNEL))
		return 0;
	for (i = 0; i + 1 < len; i += 2) {
		n = in[i] % 24;
		for (k = 0; k < 3 * n; k++)
			buffer[k] = (u8)(in[i + 1] + k);
		if (in[i + 1] & 1)
			n = __kfifo_in(&fifo, buffer, n);
		else
			n = in[i + 1] & 2 ? __kfifo_out(&fifo, buffer, n) : __kfifo_out_peek(&fifo, buffer, n);
		out[at++] = (u8)n;
		for (k = 0; !(in[i + 1] & 1) && k < 3 * n; k++)
			out[at++] = buffer[k];
	}
	__kfifo_free(&fifo);
	return at;
}

/* In: operations of four bytes: what, an index of three. */
int test_xarray(const u8 *in, unsigned int len, u8 *out)
{
	struct xarray xa = XARRAY_INIT;
	struct writer w = { out, 0 };
	unsigned long index;
	unsigned int i;
	void *entry;

	for (i = 0; i + 3 < len; i += 4) {
		index = (in[i + 1] | in[i + 2] << 8 | (unsigned long)in[i + 3] << 16) >> in[i] % 24;
		if (in[i] & 0x80)
			put(&w, (unsigned long)xa_erase(&xa, index));
		else
			put(&w, (unsigned long)xa_store(&xa, index, (void *)(uintptr_t)(i + 1), GFP_KERNEL));
		put(&w, (unsigned long)xa_load(&xa, index ^ (in[i] & 0x40 ? 1 : 0)));
	}
	xa_for_each(&xa, index, entry)
		put(&w, (u64)index << 32 | (uintptr_t)entry);
	xa_destroy(&xa);
	return w.at;
}

/* In: operations of two bytes. */
int test_idr(const u8 *in, unsigned int len, u8 *out)
{
	struct idr idr = IDR_INIT;
	struct writer w = { out, 0 };
	unsigned int i;
	void *ptr;

	for (i = 0; i + 1 < len; i += 2) {
		ptr = (void *)(uintptr_t)(i + 1);
		switch (in[i] & 3) {
		case 0:
			put(&w, (u64)idr_alloc(&idr, ptr, in[i + 1] % 16, 24, GFP_KERNEL));
			break;
		case 1:
			put(&w, (u64)idr_alloc_cyclic(&idr, ptr, in[i + 1] % 4, 20, GFP_KERNEL));
			break;
		case 2:
			put(&w, (uintptr_t)idr_remove(&idr, in[i + 1] % 24));
			break;
		default:
			put(&w, (u64)(s64)(long)idr_replace(&idr, ptr, in[i + 1] % 24));
		}
		put(&w, (uintptr_t)idr_find(&idr, in[i + 1] % 24));
	}
	idr_destroy(&idr);
	return w.at;
}
