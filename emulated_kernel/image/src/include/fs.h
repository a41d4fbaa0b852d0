/* SPDX-License-Identifier: GPL-2.0-or-later */
/* The virtual file system: inodes, dentries, files, and what works on them. */
#ifndef _FS_H
#define _FS_H

#include "poll.h"
#include "sched.h"
#include "stat.h"
#include "timer.h"

#define O_ACCMODE 00000003
#define O_RDONLY 00000000
#define O_WRONLY 00000001
#define O_RDWR 00000002
#define O_CREAT 00000100
#define O_EXCL 00000200
#define O_TRUNC 00001000
#define O_APPEND 00002000
#define O_NONBLOCK 00004000
#define O_DIRECTORY 00200000
#define O_NOFOLLOW 00400000
#define O_CLOEXEC 02000000
#define O_PATH 010000000

#define AT_FDCWD (-100)
#define AT_SYMLINK_NOFOLLOW 0x100
#define AT_EACCESS 0x200
#define AT_REMOVEDIR 0x200
#define AT_SYMLINK_FOLLOW 0x400
#define AT_NO_AUTOMOUNT 0x800
#define AT_EMPTY_PATH 0x1000
#define AT_STATX_SYNC_TYPE 0x6000

#define FMODE_READ 0x1U
#define FMODE_WRITE 0x2U
#define FMODE_LSEEK 0x4U
#define FMODE_PREAD 0x8U
#define FMODE_PWRITE 0x10U
#define FMODE_ATOMIC_POS 0x8000U
#define FMODE_OPENED 0x80000U
#define FMODE_CAN_READ 0x20000U
#define FMODE_CAN_WRITE 0x40000U
#define OPEN_FMODE(flags) ((fmode_t)(((flags) + 1) & O_ACCMODE))

#define MAY_EXEC 1
#define MAY_WRITE 2
#define MAY_READ 4
#define MAY_APPEND 8
#define MAY_OPEN 0x20

#define SEEK_SET 0
#define SEEK_CUR 1
#define SEEK_END 2

#define LOOKUP_FOLLOW 0x0001
#define LOOKUP_DIRECTORY 0x0002
#define LOOKUP_OPEN 0x0100
#define LOOKUP_CREATE 0x0200
#define LOOKUP_EMPTY 0x4000
#define MAXSYMLINKS 40

#define PATH_MAX 4096
#define NAME_MAX 255
#define MAX_RW_COUNT ((size_t)INT_MAX & ~(PAGE_SIZE - 1))

struct user_namespace {
	int level;
};
extern struct user_namespace init_user_ns;

struct dentry;
struct inode;
struct file;
struct kiocb;
struct iov_iter;
struct dir_context;
struct super_block;

struct qstr {
	u32 hash;
	u32 len;
	const char *name;
};

struct path {
	struct super_block *mnt;
	struct dentry *dentry;
};

struct super_block {
	unsigned long s_magic;
	loff_t s_maxbytes;
	dev_t s_dev;
	struct dentry *s_root;
	const char *s_mountpoint; /* where it is in the tree, NULL: nowhere */
	const char *s_pseudo;     /* what its files without a name are called */
	u64 s_next_ino;
};

struct address_space {
	struct inode *host;
	spinlock_t i_pages_lock; /* of the three below; changes also need the inode's lock */
	struct page **pages; /* index -> page, NULL for a hole */
	unsigned long nr_slots;
	unsigned long nrpages;
};

struct inode {
	umode_t i_mode;
	u32 i_nlink;
	kuid_t i_uid;
	kgid_t i_gid;
	atomic_t i_count;
	const struct inode_operations *i_op;
	const struct file_operations *i_fop;
	struct super_block *i_sb;
	u64 i_ino;
	loff_t i_size;
	struct timespec64 i_atime, i_mtime, i_ctime;
	struct mutex i_rwsem;
	struct address_space i_data;
	struct address_space *i_mapping;
	dev_t i_rdev;
	char *i_link;
	struct pipe_inode_info *i_pipe;
	void *i_private;
};

#define DNAME_INLINE_LEN 40
struct dentry {
	struct hlist_node d_hash;
	struct dentry *d_parent;
	struct qstr d_name;
	struct inode *d_inode;
	struct super_block *d_sb;
	atomic_t d_count;
	u32 d_flags;
	struct list_head d_child;
	struct list_head d_subdirs;
	struct super_block *d_mounted; /* the file system mounted here */
	void *d_fsdata;
	u64 d_cookie;                  /* position in its directory, for readdir */
	char d_iname[DNAME_INLINE_LEN];
};

struct file {
	struct path f_path;
	struct inode *f_inode;
	const struct file_operations *f_op;
	atomic_t f_count;
	unsigned int f_flags;
	fmode_t f_mode;
	struct mutex f_pos_lock;
	loff_t f_pos;
	struct address_space *f_mapping;
	void *private_data;
};

struct kiocb {
	struct file *ki_filp;
	loff_t ki_pos;
	int ki_flags;
};

struct iov_iter {
	bool data_source;
	bool user;
	size_t count;
	union {
		void __user *ubuf;
		void *kbuf;
	};
};

struct iattr {
	unsigned int ia_valid;
	umode_t ia_mode;
	kuid_t ia_uid;
	kgid_t ia_gid;
	loff_t ia_size;
	struct timespec64 ia_atime, ia_mtime, ia_ctime;
	struct file *ia_file;
};

#define ATTR_MODE (1 << 0)
#define ATTR_UID (1 << 1)
#define ATTR_GID (1 << 2)
#define ATTR_SIZE (1 << 3)
#define ATTR_ATIME (1 << 4)
#define ATTR_MTIME (1 << 5)
#define ATTR_CTIME (1 << 6)
#define ATTR_ATIME_SET (1 << 7)
#define ATTR_MTIME_SET (1 << 8)
#define ATTR_FORCE (1 << 9)
#define ATTR_FILE (1 << 13)
#define ATTR_OPEN (1 << 15)
#define ATTR_TOUCH (1 << 17)

typedef bool (*filldir_t)(struct dir_context *ctx, const char *name, int namelen, loff_t offset,
			  u64 ino, unsigned int d_type);
struct dir_context {
	filldir_t actor;
	loff_t pos;
};

struct renamedata {
	struct user_namespace *old_mnt_userns;
	struct inode *old_dir;
	struct dentry *old_dentry;
	struct user_namespace *new_mnt_userns;
	struct inode *new_dir;
	struct dentry *new_dentry;
	struct inode **delegated_inode;
	unsigned int flags;
};
#define RENAME_NOREPLACE 1

struct file_operations {
	loff_t (*llseek)(struct file *file, loff_t offset, int whence);
	ssize_t (*read)(struct file *file, char __user *buf, size_t count, loff_t *pos);
	ssize_t (*write)(struct file *file, const char __user *buf, size_t count, loff_t *pos);
	ssize_t (*read_iter)(struct kiocb *iocb, struct iov_iter *to);
	ssize_t (*write_iter)(struct kiocb *iocb, struct iov_iter *from);
	unsigned int (*poll)(struct file *file, poll_table *wait);
	int (*iterate_shared)(struct file *file, struct dir_context *ctx);
	int (*open)(struct inode *inode, struct file *file);
	int (*flush)(struct file *file, void *owner);
	int (*release)(struct inode *inode, struct file *file);
	int (*fsync)(struct file *file, loff_t start, loff_t end, int datasync);
};

struct inode_operations {
	struct dentry *(*lookup)(struct inode *dir, struct dentry *dentry, unsigned int flags);
	const char *(*get_link)(struct dentry *dentry, struct inode *inode);
	int (*create)(struct user_namespace *ns, struct inode *dir, struct dentry *dentry,
		      umode_t mode, bool excl);
	int (*link)(struct dentry *old, struct inode *dir, struct dentry *dentry);
	int (*unlink)(struct inode *dir, struct dentry *dentry);
	int (*symlink)(struct user_namespace *ns, struct inode *dir, struct dentry *dentry,
		       const char *target);
	int (*mkdir)(struct user_namespace *ns, struct inode *dir, struct dentry *dentry,
		     umode_t mode);
	int (*rmdir)(struct inode *dir, struct dentry *dentry);
	int (*mknod)(struct user_namespace *ns, struct inode *dir, struct dentry *dentry,
		     umode_t mode, dev_t dev);
	int (*rename)(struct user_namespace *ns, struct inode *old_dir, struct dentry *old_dentry,
		      struct inode *new_dir, struct dentry *new_dentry, unsigned int flags);
	int (*setattr)(struct user_namespace *ns, struct dentry *dentry, struct iattr *attr);
	int (*getattr)(struct user_namespace *ns, const struct path *path, struct kstat *stat,
		       u32 mask, unsigned int flags);
};

struct filename {
	const char *name;
	const char *walk; /* the same file's path in this kernel, where a process of the host names it otherwise */
	const char __user *uptr;
	int refcnt;
	char iname[];
};
#define EMBEDDED_NAME_MAX ((int)(PATH_MAX - sizeof(struct filename)))

struct open_how {
	u64 flags;
	u64 mode;
	u64 resolve;
};

struct open_flags {
	int open_flag;
	umode_t mode;
	int acc_mode;
	int intent;
	int lookup_flags;
};

#define NR_OPEN_DEFAULT 64
#define NR_OPEN_MAX 4096
struct files_struct {
	atomic_t count;
	spinlock_t file_lock;
	unsigned int max_fds;
	unsigned int next_fd;
	struct file **fd;
	struct file *fd_array[NR_OPEN_DEFAULT];
};

struct fd {
	struct file *file;
	unsigned int flags;
};

extern struct super_block hostfs_sb, ramfs_sb, devtmpfs_sb, tracefs_sb;
extern struct path root_path;

/* fs/namei.c */
struct filename *getname_flags(const char __user *filename, int flags, int *empty);
struct filename *getname(const char __user *filename);
struct filename *getname_kernel(const char *filename);
void putname(struct filename *name);
struct file *do_filp_open(int dfd, struct filename *pathname, const struct open_flags *op);
int filename_lookup(int dfd, struct filename *name, unsigned int flags, struct path *path,
		    struct path *root);
int user_path_at_empty(int dfd, const char __user *name, unsigned int flags, struct path *path,
		       int *empty);
#define user_path_at(dfd, name, flags, path) user_path_at_empty(dfd, name, flags, path, NULL)
int inode_permission(struct user_namespace *mnt_userns, struct inode *inode, int mask);
int generic_permission(struct user_namespace *mnt_userns, struct inode *inode, int mask);
int vfs_create(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *dentry,
	       umode_t mode, bool want_excl);
int vfs_mkdir(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *dentry,
	      umode_t mode);
int vfs_mknod(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *dentry, umode_t mode,
	      dev_t dev);
int vfs_rmdir(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *dentry);
int vfs_unlink(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *dentry,
	       struct inode **delegated_inode);
int vfs_symlink(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *dentry,
		const char *oldname);
int vfs_link(struct dentry *old_dentry, struct user_namespace *mnt_userns, struct inode *dir,
	     struct dentry *new_dentry, struct inode **delegated_inode);
int vfs_rename(struct renamedata *rd);
int vfs_readlink(struct dentry *dentry, char __user *buffer, int buflen);
struct dentry *filename_create(int dfd, struct filename *name, struct path *path,
			       unsigned int lookup_flags);
void done_path_create(struct path *path, struct dentry *dentry);
void path_get(const struct path *path);
void path_put(const struct path *path);

int do_mkdirat(int dfd, struct filename *name, umode_t mode);
int do_rmdir(int dfd, struct filename *name);
int do_unlinkat(int dfd, struct filename *name);
int do_symlinkat(struct filename *from, int newdfd, struct filename *to);
int do_linkat(int olddfd, struct filename *old, int newdfd, struct filename *new, int flags);
int do_renameat2(int olddfd, struct filename *from, int newdfd, struct filename *to,
		 unsigned int flags);

/* fs/open.c */
long do_sys_truncate(const char __user *pathname, loff_t length);
long do_sys_ftruncate(unsigned int fd, loff_t length);
int chmod_common(const struct path *path, umode_t mode);
int chown_common(const struct path *path, uid_t user, gid_t group);
long do_sys_open(int dfd, const char __user *filename, int flags, umode_t mode);
long do_sys_openat2(int dfd, const char __user *filename, struct open_how *how);
int vfs_open(const struct path *path, struct file *file);
int do_truncate(struct user_namespace *mnt_userns, struct dentry *dentry, loff_t length,
		unsigned int time_attrs, struct file *filp);
long vfs_truncate(const struct path *path, loff_t length);
struct file *filp_open(const char *filename, int flags, umode_t mode);
int filp_close(struct file *filp, void *id);
int generic_file_open(struct inode *inode, struct file *filp);

/* fs/file.c, file_table.c */
void files_init(void);
struct files_struct *dup_fd(struct files_struct *oldf);
struct files_struct *alloc_files(void);
int alloc_fd(unsigned int start, unsigned int end, unsigned int flags);
int get_unused_fd_flags(unsigned int flags);
void put_unused_fd(unsigned int fd);
void fd_install(unsigned int fd, struct file *file);
int close_fd(unsigned int fd);
struct file *fget(unsigned int fd);
unsigned long __fdget(unsigned int fd);
unsigned long __fdget_pos(unsigned int fd);
struct file *alloc_empty_file(int flags, const struct cred *cred);
struct file *alloc_file_pseudo(struct inode *inode, struct super_block *sb, int flags,
			       const struct file_operations *fops);
struct file *alloc_file_clone(struct file *base, int flags, const struct file_operations *fops);
void fput(struct file *file);
void __fput(struct file *file);
void put_files_struct(struct files_struct *files);
struct file *get_file(struct file *f);

/* fs/read_write.c, mm/filemap.c, lib/iov_iter.c */
ssize_t vfs_read(struct file *file, char __user *buf, size_t count, loff_t *pos);
ssize_t vfs_write(struct file *file, const char __user *buf, size_t count, loff_t *pos);
ssize_t kernel_read(struct file *file, void *buf, size_t count, loff_t *pos);
ssize_t kernel_write(struct file *file, const void *buf, size_t count, loff_t *pos);
ssize_t ksys_read(unsigned int fd, char __user *buf, size_t count);
ssize_t ksys_write(unsigned int fd, const char __user *buf, size_t count);
ssize_t ksys_pread64(unsigned int fd, char __user *buf, size_t count, loff_t pos);
ssize_t ksys_pwrite64(unsigned int fd, const char __user *buf, size_t count, loff_t pos);
loff_t ksys_lseek(unsigned int fd, loff_t offset, unsigned int whence);
loff_t vfs_llseek(struct file *file, loff_t offset, int whence);
loff_t generic_file_llseek(struct file *file, loff_t offset, int whence);
int rw_verify_area(int read_write, struct file *file, const loff_t *ppos, size_t count);
ssize_t filemap_read(struct kiocb *iocb, struct iov_iter *iter, ssize_t already_read);
ssize_t generic_perform_write(struct kiocb *iocb, struct iov_iter *i);
ssize_t __generic_file_write_iter(struct kiocb *iocb, struct iov_iter *from);
ssize_t generic_file_read_iter(struct kiocb *iocb, struct iov_iter *iter);
ssize_t generic_file_write_iter(struct kiocb *iocb, struct iov_iter *from);
void truncate_pagecache(struct inode *inode, loff_t newsize);
void truncate_inode_pages_final(struct address_space *mapping);
void iov_iter_ubuf(struct iov_iter *i, bool source, void __user *buf, size_t count);
void iov_iter_kbuf(struct iov_iter *i, bool source, void *buf, size_t count);
size_t copy_to_iter(const void *addr, size_t bytes, struct iov_iter *i);
size_t copy_from_iter(void *addr, size_t bytes, struct iov_iter *i);
size_t copy_page_to_iter(struct page *page, size_t offset, size_t bytes, struct iov_iter *i);
size_t copy_page_from_iter(struct page *page, size_t offset, size_t bytes, struct iov_iter *i);
size_t iov_iter_zero(size_t bytes, struct iov_iter *i);

/* fs/attr.c, stat.c, readdir.c */
int notify_change(struct user_namespace *mnt_userns, struct dentry *dentry, struct iattr *attr,
		  struct inode **delegated_inode);
int setattr_prepare(struct user_namespace *mnt_userns, struct dentry *dentry, struct iattr *attr);
void setattr_copy(struct user_namespace *mnt_userns, struct inode *inode,
		  const struct iattr *attr);
int inode_newsize_ok(const struct inode *inode, loff_t offset);
int vfs_getattr(const struct path *path, struct kstat *stat, u32 request_mask,
		unsigned int query_flags);
void generic_fillattr(struct user_namespace *mnt_userns, struct inode *inode, struct kstat *stat);
int vfs_statx(int dfd, struct filename *filename, int flags, struct kstat *stat, u32 mask);
int vfs_utimes(const struct path *path, const struct timespec64 *times);
int vfs_fstatat(int dfd, const char __user *filename, struct kstat *stat, int flags);
int vfs_fstat(int fd, struct kstat *stat);
int iterate_dir(struct file *file, struct dir_context *ctx);

/* fs/inode.c, dcache.c, libfs.c */
void vfs_caches_init(void);
struct inode *new_inode(struct super_block *sb);
void iput(struct inode *inode);
void ihold(struct inode *inode);
void inode_init_owner(struct user_namespace *mnt_userns, struct inode *inode,
		      const struct inode *dir, umode_t mode);
bool inode_owner_or_capable(struct user_namespace *mnt_userns, const struct inode *inode);
struct timespec64 current_time(struct inode *inode);
void touch_atime(const struct path *path);
int file_update_time(struct file *file);
struct dentry *d_alloc(struct dentry *parent, const struct qstr *name);
struct dentry *d_alloc_pseudo(struct super_block *sb, const struct qstr *name);
struct dentry *d_make_root(struct super_block *sb, struct inode *root_inode);
void d_instantiate(struct dentry *entry, struct inode *inode);
void d_add(struct dentry *entry, struct inode *inode);
struct dentry *d_lookup(const struct dentry *parent, const struct qstr *name);
void d_delete(struct dentry *dentry);
extern spinlock_t dcache_lock;
void d_drop(struct dentry *dentry);
void d_move(struct dentry *dentry, struct dentry *target);
struct dentry *dget(struct dentry *dentry);
void dput(struct dentry *dentry);
char *d_path(const struct path *path, char *buf, int buflen);
int simple_empty(struct dentry *dentry);
int simple_unlink(struct inode *dir, struct dentry *dentry);
int simple_rmdir(struct inode *dir, struct dentry *dentry);
int simple_link(struct dentry *old_dentry, struct inode *dir, struct dentry *dentry);
int simple_rename(struct user_namespace *mnt_userns, struct inode *old_dir,
		  struct dentry *old_dentry, struct inode *new_dir, struct dentry *new_dentry,
		  unsigned int flags);
int simple_setattr(struct user_namespace *mnt_userns, struct dentry *dentry, struct iattr *attr);
int simple_getattr(struct user_namespace *mnt_userns, const struct path *path, struct kstat *stat,
		   u32 mask, unsigned int flags);
struct dentry *simple_lookup(struct inode *dir, struct dentry *dentry, unsigned int flags);
int dcache_readdir(struct file *file, struct dir_context *ctx);
loff_t dcache_dir_lseek(struct file *file, loff_t offset, int whence);
ssize_t generic_read_dir(struct file *file, char __user *buf, size_t size, loff_t *pos);
int noop_fsync(struct file *file, loff_t start, loff_t end, int datasync);
int vfs_fsync(struct file *file, int datasync);
int vfs_fsync_range(struct file *file, loff_t start, loff_t end, int datasync);

/* fs/char_dev.c, select.c, pipe.c */
void init_special_inode(struct inode *inode, umode_t mode, dev_t rdev);
unsigned int vfs_poll(struct file *file, poll_table *wait);
void init_pipe_fs(void);

int ramfs_mknod(struct user_namespace *mnt_userns, struct inode *dir, struct dentry *dentry,
		umode_t mode, dev_t dev);
void init_ramfs_fs(void);
void init_hostfs_fs(void);
void tracefs_init(void);
struct dentry *tracefs_create_dir(const char *name, struct dentry *parent);
struct dentry *tracefs_create_file(const char *name, umode_t mode, struct dentry *parent,
				   void *data, const struct file_operations *fops);
void tracefs_remove(struct dentry *dentry);
bool is_hostfs_path(const char *name);

static __always_inline void inode_lock(struct inode *inode)
{
	mutex_lock(&inode->i_rwsem);
}

static __always_inline void inode_unlock(struct inode *inode)
{
	mutex_unlock(&inode->i_rwsem);
}

static __always_inline loff_t i_size_read(const struct inode *inode)
{
	return READ_ONCE(inode->i_size);
}

static __always_inline struct fd fdget(unsigned int fd)
{
	return (struct fd){ (struct file *)__fdget(fd), 0 };
}

static __always_inline void fdput(struct fd f)
{
	if (f.file)
		fput(f.file);
}

static __always_inline bool d_is_negative(const struct dentry *dentry)
{
	return !dentry->d_inode;
}

#endif
