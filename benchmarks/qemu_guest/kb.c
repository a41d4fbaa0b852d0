// SPDX-License-Identifier: GPL-2.0-or-later
/*
 * Functions to probe, one for each way of taking a hit, and a device that calls them: a write of "NAME COUNT"
 * calls the function NAME COUNT times.
 */
#include <linux/fs.h>
#include <linux/miscdevice.h>
#include <linux/module.h>
#include <linux/namei.h>
#include <linux/uaccess.h>

/* A branch leads to the second instruction after the call of __fentry__, so no jump can replace the first. */
noinline int kb_stepped(int value)
{
	int sum;

	asm volatile("movl %1, %0\n"
		     "1: addl $1, %0\n"
		     "jz 1b\n"
		     : "=&r"(sum)
		     : "r"(value));
	return sum;
}

/* Kprobes emulates the branch after the call of __fentry__. */
noinline void kb_emulated(int value)
{
	asm volatile("jmp 1f\n"
		     "1:");
}

/* The instruction after the call of __fentry__ has the size of a jump. */
noinline void kb_optimized(int value)
{
	asm volatile("movl $1, %%eax\n"
		     "movl $2, %%eax"
		     ::: "eax");
}

/* The call of __fentry__ is at the start. */
noinline void kb_ftrace(int value)
{
	asm volatile("");
}

/* Nothing calls this function. */
noinline void kb_never(int value)
{
	asm volatile("");
}

#define CALL(function)                                  \
	do {                                            \
		for (left = count; left; left--)        \
			function(left);                 \
	} while (0)

static ssize_t kb_write(struct file *file, const char __user *text, size_t size, loff_t *position)
{
	char line[64] = "", name[16];
	unsigned int count, left;

	if (size >= sizeof(line) || copy_from_user(line, text, size))
		return -EFAULT;
	if (sscanf(line, "%15s %u", name, &count) != 2)
		return -EINVAL;
	if (!strcmp(name, "stepped"))
		CALL(kb_stepped);
	else if (!strcmp(name, "emulated"))
		CALL(kb_emulated);
	else if (!strcmp(name, "optimized"))
		CALL(kb_optimized);
	else if (!strcmp(name, "ftrace"))
		CALL(kb_ftrace);
	else
		return -ENOENT;
	return size;
}

static const struct file_operations kb_operations = {
	.owner = THIS_MODULE,
	.write = kb_write,
};

static struct miscdevice kb_device = {
	.minor = MISC_DYNAMIC_MINOR,
	.name = "kb",
	.fops = &kb_operations,
	.mode = 0600,
};

/* A kernel that has no devtmpfs at /dev gets the file here. */
static void __init kb_make_file(void)
{
	struct path path;
	struct dentry *dentry = kern_path_create(AT_FDCWD, "/dev/kb", &path, 0);

	if (IS_ERR(dentry))
		return;
	vfs_mknod(mnt_user_ns(path.mnt), d_inode(path.dentry), dentry, S_IFCHR | 0600,
		  MKDEV(MISC_MAJOR, kb_device.minor));
	done_path_create(&path, dentry);
}

static int __init kb_init(void)
{
	int error = misc_register(&kb_device);

	if (!error)
		kb_make_file();
	return error;
}

static void __exit kb_exit(void)
{
	misc_deregister(&kb_device);
}

module_init(kb_init);
module_exit(kb_exit);
MODULE_LICENSE("GPL");
MODULE_DESCRIPTION("Functions to probe for a comparison of kprobefs with virtual machines");
