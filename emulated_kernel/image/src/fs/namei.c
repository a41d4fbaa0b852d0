// SPDX-License-Identifier: GPL-2.0-or-later
// Path lookup: names from user space, the walk from component to component, symbolic links.
#include "errno.h"
#include "extable.h"
#include "fs_struct.h"
#include "host_abi.h"
#include "internal.h"
#include "mm.h"
#include "printk.h"
#include "string.h"
#include "uaccess.h"

struct path root_path;

static struct kmem_cache *names_cachep;

__init void namei_init(void)
{
	names_cachep = kmem_cache_create("names_cache", PATH_MAX, 8, 0, NULL);
}

/* Behind the name; where there isn't room for both, the path takes its place. */
static __always_inline void host_walk_name(struct filename *result, const char __user *filename, long len)
{
	char *walk = result->iname + len + 1;
	u8 c = 1;

	if (!current->host_names)
		return;
	if (len > EMBEDDED_NAME_MAX / 2)
		walk = result->iname;
	result->walk = walk;
	for (filename += PATH_MAX; c && walk < result->iname + EMBEDDED_NAME_MAX - 1; walk++) {
		if (__load_u8_nofault(&c, filename++))
			c = 0;
		*walk = (char)c;
	}
	*walk = '\0';
}

struct filename *getname_flags(const char __user *filename, int flags, int *empty)
{
	struct filename *result = kmem_cache_alloc(names_cachep, GFP_KERNEL);
	long len;

	if (unlikely(!result))
		return ERR_PTR(-ENOMEM);
	result->refcnt = 1;
	result->uptr = filename;
	result->name = result->walk = result->iname;
	if (current->host_names == HOST_NAMES_UNKNOWN)
		len = strncpy_from_user(result->iname, filename + PATH_MAX, EMBEDDED_NAME_MAX);
	else
		len = strncpy_from_user(result->iname, filename, EMBEDDED_NAME_MAX);
	if (len == EMBEDDED_NAME_MAX)
		len = -ENAMETOOLONG;
	if (!len && empty)
		*empty = 1;
	if (!len && !(flags & LOOKUP_EMPTY))
		len = -ENOENT;
	if (len >= 0) {
		host_walk_name(result, filename, len);
		return result;
	}
	putname(result);
	return ERR_PTR(len);
}

struct filename *getname(const char __user *filename)
{
	return getname_flags(filename, 0, NULL);
}

struct filename *getname_kernel(const char *filename)
{
	struct filename *result = kmem_cache_alloc(names_cachep, GFP_KERNEL);

	if (unlikely(!result))
		return ERR_PTR(-ENOMEM);
	result->refcnt = 1;
	result->uptr = NULL;
	result->name = result->walk = result->iname;
	if (strscpy(result->iname, filename, EMBEDDED_NAME_MAX) < 0) {
		putname(result);
		return ERR_PTR(-ENAMETOOLONG);
	}
	return result;
}

void putname(struct filename *name)
{
	if (IS_ERR_OR_NULL(name))
		return;
	if (--name->refcnt > 0)
		return;
	kmem_cache_free(names_cachep, name);
}

void path_get(const struct path *path)
{
	dget(path->dentry);
}

void path_put(const struct path *path)
{
	dput(path->dentry);
}

static noinline int acl_permission_check(struct inode *inode, int mask)
{
	const struct cred *cred = current_cred();
	unsigned int mode = inode->i_mode;

	if (cred->fsuid.val == inode->i_uid.val)
		mode >>= 6;
	else if (cred->fsgid.val == inode->i_gid.val)
		mode >>= 3;
	return (mask & ~mode & 7) ? -EACCES : 0;
}

/* Root may do all but execute a file that nobody may execute. */
int generic_permission(struct user_namespace *mnt_userns __attribute__((unused)),
		       struct inode *inode, int mask)
{
	int ret = acl_permission_check(inode, mask);

	if (ret != -EACCES || current_cred()->fsuid.val != 0)
		return ret;
	if (S_ISDIR(inode->i_mode) || !(mask & MAY_EXEC) || inode->i_mode & 0111)
		return 0;
	return -EACCES;
}

int inode_permission(struct user_namespace *mnt_userns, struct inode *inode, int mask)
{
	return generic_permission(mnt_userns, inode, mask & (MAY_READ | MAY_WRITE | MAY_EXEC));
}

static int may_lookup(struct nameidata *nd)
{
	return inode_permission(&init_user_ns, nd->path.dentry->d_inode, MAY_EXEC);
}

/* The caller holds the directory's lock. */
struct dentry *__lookup_hash(const struct qstr *name, struct dentry *base, unsigned int flags)
{
	struct dentry *dentry = d_lookup(base, name), *old;
	struct inode *dir = base->d_inode;

	if (dentry)
		return dentry;
	if (!dir->i_op->lookup)
		return ERR_PTR(-ENOTDIR);
	dentry = d_alloc(base, name);
	if (unlikely(!dentry))
		return ERR_PTR(-ENOMEM);
	old = dir->i_op->lookup(dir, dentry, flags);
	if (unlikely(old)) {
		dput(dentry);
		dentry = old;
	}
	return dentry;
}

static noinline struct dentry *lookup_slow(const struct qstr *name, struct dentry *dir,
					   unsigned int flags)
{
	struct dentry *dentry;

	inode_lock(dir->d_inode);
	dentry = __lookup_hash(name, dir, flags);
	inode_unlock(dir->d_inode);
	return dentry;
}

/* Enters an entry and, where one is, the file system mounted on it; takes the reference. */
void step_into(struct nameidata *nd, struct dentry *dentry)
{
	struct dentry *mounted;

	if (dentry->d_mounted) {
		mounted = dget(dentry->d_mounted->s_root);
		dput(dentry);
		dentry = mounted;
	}
	path_put(&nd->path);
	nd->path.dentry = dentry;
	nd->path.mnt = dentry->d_sb;
}

static noinline void follow_dotdot(struct nameidata *nd)
{
	struct dentry *dentry = nd->path.dentry;

	if (dentry == dentry->d_sb->s_root)
		step_into(nd, dget(root_path.dentry));
	else
		step_into(nd, dget(dentry->d_parent));
}

int handle_dots(struct nameidata *nd)
{
	if (nd->last_type == LAST_DOTDOT)
		follow_dotdot(nd);
	return 0;
}

static int walk_component(struct nameidata *nd, unsigned int flags)
{
	struct dentry *dentry;
	int err;

	if (unlikely(nd->last_type != LAST_NORM))
		return handle_dots(nd);
	dentry = d_lookup(nd->path.dentry, &nd->last);
	if (!dentry)
		dentry = lookup_slow(&nd->last, nd->path.dentry, nd->flags | flags);
	if (IS_ERR(dentry))
		return (int)PTR_ERR(dentry);
	if (unlikely(d_is_negative(dentry))) {
		dput(dentry);
		return -ENOENT;
	}
	if (S_ISLNK(dentry->d_inode->i_mode) && flags & LOOKUP_FOLLOW) {
		err = follow_link(nd, dentry);
		return err ? err : walk_component(nd, LOOKUP_FOLLOW);
	}
	step_into(nd, dentry);
	return 0;
}

/* Walks a link's text up to its last component; takes the reference to the link. */
int follow_link(struct nameidata *nd, struct dentry *link)
{
	struct inode *inode = link->d_inode;
	const char *text;

	if (unlikely(nd->nr_links >= MAXSYMLINKS)) {
		dput(link);
		return -ELOOP;
	}
	nd->links[nd->nr_links++] = link;
	text = inode->i_op->get_link(link, inode);
	if (IS_ERR(text))
		return (int)PTR_ERR(text);
	if (*text == '/')
		step_into(nd, dget(root_path.dentry));
	return link_path_walk(text, nd);
}

static int component_type(const char *name, unsigned int len)
{
	if (name[0] != '.' || len > 2)
		return LAST_NORM;
	if (len == 1)
		return LAST_DOT;
	return name[1] == '.' ? LAST_DOTDOT : LAST_NORM;
}

/* A path of the host is one name: the host knows the tree, this kernel doesn't. */
static bool hostfs_rest(const struct nameidata *nd, const char *name)
{
	return nd->path.dentry == root_path.dentry && is_hostfs_path(name);
}

static void set_last(struct nameidata *nd, const char *name, unsigned int len)
{
	nd->last.name = name;
	nd->last.len = len;
	nd->last.hash = full_name_hash(nd->path.dentry, name, len);
	nd->last_type = component_type(name, len);
}

/* Ends with nd->path at the parent of the last component, which is in nd->last. */
int link_path_walk(const char *name, struct nameidata *nd)
{
	unsigned int len;
	int err;

	nd->last_type = LAST_ROOT;
	while (*name == '/')
		name++;
	while (*name) {
		if (!S_ISDIR(nd->path.dentry->d_inode->i_mode))
			return -ENOTDIR;
		err = may_lookup(nd);
		if (err)
			return err;
		if (hostfs_rest(nd, name)) {
			set_last(nd, name, (unsigned int)strlen(name));
			nd->last_type = LAST_NORM;
			return 0;
		}
		len = (unsigned int)(strchrnul(name, '/') - name);
		if (len > NAME_MAX)
			return -ENAMETOOLONG;
		set_last(nd, name, len);
		name += len;
		while (*name == '/')
			name++;
		if (!*name)
			return 0;
		err = walk_component(nd, LOOKUP_FOLLOW | LOOKUP_DIRECTORY);
		if (err)
			return err;
	}
	return 0;
}

static int path_init_at(struct nameidata *nd, int dfd)
{
	struct fd f = fdget(dfd);

	if (!f.file)
		return -EBADF;
	nd->path = f.file->f_path;
	path_get(&nd->path);
	fdput(f);
	return 0;
}

int path_init(struct nameidata *nd, int dfd, struct filename *name, unsigned int flags)
{
	nd->flags = flags;
	nd->nr_links = 0;
	nd->path = (struct path){ NULL, NULL };
	if (name->walk[0] != '/' && dfd != AT_FDCWD)
		return path_init_at(nd, dfd);
	if (name->walk[0] != '/') {
		get_fs_pwd(&nd->path);
		return 0;
	}
	nd->path = root_path;
	path_get(&nd->path);
	return 0;
}

void terminate_walk(struct nameidata *nd)
{
	path_put(&nd->path);
	nd->path.dentry = NULL;
	while (nd->nr_links)
		dput(nd->links[--nd->nr_links]);
}

static int path_lookupat(struct nameidata *nd, int dfd, struct filename *name, unsigned int flags,
			 struct path *path)
{
	int err = path_init(nd, dfd, name, flags);

	if (!err)
		err = link_path_walk(name->walk, nd);
	if (!err && nd->last_type != LAST_ROOT) {
		if (trailing_slash(nd))
			nd->flags |= LOOKUP_FOLLOW | LOOKUP_DIRECTORY;
		err = walk_component(nd, nd->flags & (LOOKUP_FOLLOW | LOOKUP_DIRECTORY));
	}
	if (!err && nd->flags & LOOKUP_DIRECTORY && !S_ISDIR(nd->path.dentry->d_inode->i_mode))
		err = -ENOTDIR;
	if (!err) {
		*path = nd->path;
		path_get(path);
	}
	terminate_walk(nd);
	return err;
}

int filename_lookup(int dfd, struct filename *name, unsigned int flags, struct path *path,
		    struct path *root __attribute__((unused)))
{
	struct nameidata nd;

	if (IS_ERR(name))
		return (int)PTR_ERR(name);
	return path_lookupat(&nd, dfd, name, flags, path);
}

int user_path_at_empty(int dfd, const char __user *name, unsigned int flags, struct path *path,
		       int *empty)
{
	struct filename *filename = getname_flags(name, flags, empty);
	int ret = filename_lookup(dfd, filename, flags, path, NULL);

	putname(filename);
	return ret;
}

/* The caller ends the walk, also after an error. */
int path_parentat(struct nameidata *nd, int dfd, struct filename *name, unsigned int flags)
{
	int err = path_init(nd, dfd, name, flags);

	return err ? err : link_path_walk(name->walk, nd);
}
