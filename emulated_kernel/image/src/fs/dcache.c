// SPDX-License-Identifier: GPL-2.0-or-later
// Directory entries: names in memory, found by a hash of parent and name.
#include "errno.h"
#include "fs.h"
#include "mm.h"
#include "printk.h"
#include "string.h"

#define D_HASH_BITS 10
#define DCACHE_HASHED 1U
static struct hlist_head dentry_hashtable[1 << D_HASH_BITS];
static struct kmem_cache *dentry_cachep;
/* The hash table, the lists of children, and that an entry without users is found no more. */
DEFINE_SPINLOCK(dcache_lock);
static u64 next_cookie = 2;

__init void dcache_init(void)
{
	dentry_cachep = kmem_cache_create("dentry", sizeof(struct dentry), 64, 0, NULL);
}

static __always_inline unsigned int name_hash(const void *salt, const char *name, unsigned int len)
{
	unsigned int hash = (unsigned int)((unsigned long)salt >> 6);

	while (len--)
		hash = (hash + (unsigned char)*name++) * 0x9e3779b1U;
	return hash;
}

unsigned int full_name_hash(const void *salt, const char *name, unsigned int len)
{
	return name_hash(salt, name, len);
}

static __always_inline struct hlist_head *d_hash(unsigned int hash)
{
	return &dentry_hashtable[hash >> (32 - D_HASH_BITS)];
}

static bool d_same_name(const struct dentry *dentry, const struct dentry *parent,
			const struct qstr *name)
{
	return dentry->d_name.hash == name->hash && dentry->d_parent == parent &&
	       dentry->d_name.len == name->len &&
	       !memcmp(dentry->d_name.name, name->name, name->len);
}

struct dentry *__d_lookup(const struct dentry *parent, const struct qstr *name)
{
	struct dentry *dentry, *found = NULL;

	spin_lock(&dcache_lock);
	hlist_for_each_entry(dentry, d_hash(name->hash), d_hash) {
		if (d_same_name(dentry, parent, name)) {
			found = dget(dentry);
			break;
		}
	}
	spin_unlock(&dcache_lock);
	return found;
}

struct dentry *d_lookup(const struct dentry *parent, const struct qstr *name)
{
	return __d_lookup(parent, name);
}

static __always_inline bool host_same_name(const struct dentry *dentry, const char *name, unsigned int len)
{
	unsigned int i;

	for (i = 0; i < len; i++)
		if (dentry->d_name.name[i] != name[i])
			return false;
	return true;
}

/* For the host, which asks while nothing else runs: without locks, references and traces. */
noinstr struct dentry *host_d_lookup(const struct dentry *parent, const char *name, unsigned int len)
{
	unsigned int hash = name_hash(parent, name, len);
	struct dentry *dentry;

	hlist_for_each_entry(dentry, d_hash(hash), d_hash)
		if (dentry->d_name.hash == hash && dentry->d_parent == parent && dentry->d_name.len == len &&
		    host_same_name(dentry, name, len))
			return dentry->d_inode ? dentry : NULL;
	return NULL;
}

static int set_name(struct dentry *dentry, const struct qstr *name)
{
	char *dname = dentry->d_iname;

	if (name->len >= DNAME_INLINE_LEN)
		dname = kmalloc(name->len + 1, GFP_KERNEL);
	if (!dname)
		return -ENOMEM;
	memcpy(dname, name->name, name->len);
	dname[name->len] = '\0';
	dentry->d_name.name = dname;
	dentry->d_name.len = name->len;
	return 0;
}

static void free_name(struct dentry *dentry)
{
	if (dentry->d_name.name != dentry->d_iname)
		kfree(dentry->d_name.name);
}

static noinline struct dentry *__d_alloc(struct super_block *sb, const struct qstr *name)
{
	struct dentry *dentry = kmem_cache_zalloc(dentry_cachep, GFP_KERNEL);

	if (!dentry)
		return NULL;
	if (set_name(dentry, name)) {
		kmem_cache_free(dentry_cachep, dentry);
		return NULL;
	}
	atomic_set(&dentry->d_count, 1);
	dentry->d_sb = sb;
	dentry->d_parent = dentry;
	INIT_LIST_HEAD(&dentry->d_child);
	INIT_LIST_HEAD(&dentry->d_subdirs);
	return dentry;
}

struct dentry *d_alloc(struct dentry *parent, const struct qstr *name)
{
	struct dentry *dentry = __d_alloc(parent->d_sb, name);

	if (!dentry)
		return NULL;
	dentry->d_parent = dget(parent);
	dentry->d_name.hash = full_name_hash(parent, name->name, name->len);
	spin_lock(&dcache_lock);
	dentry->d_cookie = next_cookie++;
	list_add_tail(&dentry->d_child, &parent->d_subdirs);
	spin_unlock(&dcache_lock);
	return dentry;
}

/* Of something that is in no directory. */
struct dentry *d_alloc_pseudo(struct super_block *sb, const struct qstr *name)
{
	return __d_alloc(sb, name);
}

struct dentry *d_make_root(struct super_block *sb, struct inode *root_inode)
{
	static const struct qstr name = { .name = "/", .len = 1 };
	struct dentry *dentry;

	if (!root_inode)
		return NULL;
	dentry = __d_alloc(sb, &name);
	if (dentry)
		d_instantiate(dentry, root_inode);
	else
		iput(root_inode);
	return dentry;
}

void d_instantiate(struct dentry *entry, struct inode *inode)
{
	entry->d_inode = inode;
}

static void __d_rehash(struct dentry *entry)
{
	hlist_add_head(&entry->d_hash, d_hash(entry->d_name.hash));
}

void d_add(struct dentry *entry, struct inode *inode)
{
	d_instantiate(entry, inode);
	spin_lock(&dcache_lock);
	__d_rehash(entry);
	spin_unlock(&dcache_lock);
}

static void __d_drop(struct dentry *dentry)
{
	hlist_del_init(&dentry->d_hash);
}

void d_drop(struct dentry *dentry)
{
	spin_lock(&dcache_lock);
	__d_drop(dentry);
	spin_unlock(&dcache_lock);
}

static __always_inline void __d_delete(struct dentry *dentry)
{
	__d_drop(dentry);
	list_del_init(&dentry->d_child);
}

/* The name is gone; whoever has the file open keeps entry and inode. */
void d_delete(struct dentry *dentry)
{
	spin_lock(&dcache_lock);
	__d_delete(dentry);
	spin_unlock(&dcache_lock);
}

struct dentry *dget(struct dentry *dentry)
{
	if (dentry)
		atomic_inc(&dentry->d_count);
	return dentry;
}

/* Drops the lock. */
static noinline struct dentry *__dentry_kill(struct dentry *dentry)
{
	struct dentry *parent = dentry->d_parent == dentry ? NULL : dentry->d_parent;

	__d_delete(dentry);
	spin_unlock(&dcache_lock);
	if (dentry->d_inode)
		iput(dentry->d_inode);
	free_name(dentry);
	kmem_cache_free(dentry_cachep, dentry);
	return parent;
}

/* True, and the lock is held: that was the last user. Mirrors: atomic_dec_and_lock(). */
static __always_inline bool fast_dput(struct dentry *dentry)
{
	int count = atomic_read(&dentry->d_count);

	while (count > 1)
		if (__atomic_compare_exchange_n(&dentry->d_count.counter, &count, count - 1, false,
						__ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST))
			return false;
	spin_lock(&dcache_lock);
	if (atomic_dec_and_test(&dentry->d_count))
		return true;
	spin_unlock(&dcache_lock);
	return false;
}

/* Entries without users aren't kept; ramfs holds a reference to those that exist. */
void dput(struct dentry *dentry)
{
	while (dentry && fast_dput(dentry))
		dentry = __dentry_kill(dentry);
}

/* Gives dentry the place and name of target, which disappears. */
void d_move(struct dentry *dentry, struct dentry *target)
{
	struct dentry *old_parent = dentry->d_parent, *new_parent = target->d_parent;
	struct qstr name = target->d_name;
	char inline_name[DNAME_INLINE_LEN];

	spin_lock(&dcache_lock);
	__d_drop(dentry);
	__d_delete(target);
	free_name(dentry);
	if (name.name == target->d_iname) {
		memcpy(inline_name, target->d_iname, DNAME_INLINE_LEN);
		memcpy(dentry->d_iname, inline_name, DNAME_INLINE_LEN);
		name.name = dentry->d_iname;
	} else {
		target->d_name.name = target->d_iname;
		target->d_name.len = 0;
	}
	dentry->d_name = name;
	dentry->d_parent = dget(new_parent);
	dentry->d_cookie = next_cookie++;
	list_move_tail(&dentry->d_child, &new_parent->d_subdirs);
	__d_rehash(dentry);
	spin_unlock(&dcache_lock);
	dput(old_parent);
}

static int prepend(char **buffer, int *buflen, const char *str, int namelen)
{
	*buflen -= namelen;
	if (*buflen < 0)
		return -ENAMETOOLONG;
	*buffer -= namelen;
	memcpy(*buffer, str, namelen);
	return 0;
}

static int prepend_path(struct dentry *dentry, char **buffer, int *buflen)
{
	const char *mountpoint = dentry->d_sb->s_mountpoint;
	int error = 0;

	spin_lock(&dcache_lock);
	while (!error && dentry != dentry->d_parent) {
		error = prepend(buffer, buflen, dentry->d_name.name, dentry->d_name.len);
		if (!error)
			error = prepend(buffer, buflen, "/", 1);
		dentry = dentry->d_parent;
	}
	spin_unlock(&dcache_lock);
	if (!error && mountpoint)
		error = prepend(buffer, buflen, mountpoint, (int)strlen(mountpoint));
	return error;
}

/* Mirrors: dynamic_dname(), as pipes and sockets have it. */
static noinline char *dynamic_dname(const struct dentry *dentry, char *buf, int buflen)
{
	int len = snprintf(buf, buflen, "%s:[%llu]", dentry->d_sb->s_pseudo, dentry->d_inode->i_ino);

	return len < buflen ? buf : ERR_PTR(-ENAMETOOLONG);
}

char *d_path(const struct path *path, char *buf, int buflen)
{
	char *res = buf + buflen;
	int error = prepend(&res, &buflen, "\0", 1);
	const char *end = res;

	if (path->dentry->d_sb->s_pseudo)
		return dynamic_dname(path->dentry, buf, buflen + 1);
	if (!error)
		error = prepend_path(path->dentry, &res, &buflen);
	if (!error && res == end)
		error = prepend(&res, &buflen, "/", 1);
	return error ? ERR_PTR(error) : res;
}
