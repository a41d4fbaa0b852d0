/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Where a task stands in the tree; a task without one stands at the root. */
#ifndef _FS_STRUCT_H
#define _FS_STRUCT_H

#include "fs.h"

struct fs_struct {
	atomic_t users;
	spinlock_t lock;
	struct path pwd;
};

int copy_fs(unsigned long clone_flags, struct task_struct *tsk);
void exit_fs(struct task_struct *tsk);
int set_fs_pwd(const struct path *path);
void get_fs_pwd(struct path *pwd);

#endif
