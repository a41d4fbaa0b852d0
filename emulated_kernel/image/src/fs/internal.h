/* SPDX-License-Identifier: GPL-2.0-or-later */
/* What the files of path lookup share with one another only. */
#ifndef _FS_INTERNAL_H
#define _FS_INTERNAL_H

#include "fs.h"

enum { LAST_NORM, LAST_ROOT, LAST_DOT, LAST_DOTDOT };

struct nameidata {
	struct path path;
	struct qstr last;
	int last_type;
	unsigned int flags;
	int nr_links;
	/* Followed links stay referenced: last.name may point into their text. */
	struct dentry *links[MAXSYMLINKS];
};

#define LOOKUP_EXCL 0x0400
#define LOOKUP_RENAME_TARGET 0x0800

int path_init(struct nameidata *nd, int dfd, struct filename *name, unsigned int flags);
int link_path_walk(const char *name, struct nameidata *nd);
int path_parentat(struct nameidata *nd, int dfd, struct filename *name, unsigned int flags);
int follow_link(struct nameidata *nd, struct dentry *link);
void step_into(struct nameidata *nd, struct dentry *dentry);
int handle_dots(struct nameidata *nd);
void terminate_walk(struct nameidata *nd);
struct dentry *__lookup_hash(const struct qstr *name, struct dentry *base, unsigned int flags);
int may_create(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *child);
int may_delete(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *victim,
	       bool isdir);
int may_open(const struct path *path, int acc_mode, int flag);

static __always_inline bool trailing_slash(const struct nameidata *nd)
{
	return nd->last_type == LAST_NORM && nd->last.name[nd->last.len] == '/';
}

#endif
