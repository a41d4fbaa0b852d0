// SPDX-License-Identifier: GPL-2.0-or-later
// Workloads on files and pipes.
#include "load.h"
#include "errno.h"
#include "fs.h"
#include "mm.h"
#include "pipe_fs_i.h"
#include "printk.h"
#include "string.h"

void load_fill(u8 *block, unsigned int number)
{
	u32 state = number * 2654435761U + 1;
	unsigned int i;

	for (i = 0; i < LOAD_BLOCK; i++) {
		state = state * 1664525 + 1013904223;
		block[i] = (u8)(state >> 24);
	}
}

u32 load_sum(u32 sum, const u8 *block)
{
	return crc32_le(sum, block, LOAD_BLOCK);
}

struct pipe_load {
	struct file *writer;
	unsigned int blocks;
};

/* Closes its end when it is done, which is what ends the reader. */
static noinline int load_pipe_writer(void *data)
{
	struct pipe_load *load = data;
	u8 *block = kmalloc(LOAD_BLOCK, GFP_KERNEL);
	unsigned int i;

	for (i = 0; block && i < load->blocks; i++) {
		load_fill(block, i);
		if (kernel_write(load->writer, block, LOAD_BLOCK, NULL) != LOAD_BLOCK)
			break;
	}
	kfree(block);
	fput(load->writer);
	return 0;
}

/* In steps that are no multiple of what is written. */
static noinline ssize_t read_all(struct file *file, u8 *block, u32 *sum)
{
	ssize_t count, total = 0;

	while ((count = kernel_read(file, block, 700, NULL)) > 0) {
		*sum = crc32_le(*sum, block, (size_t)count);
		total += count;
	}
	return count ? count : total;
}

/* A thread writes n KiB into a pipe, the caller reads them. */
noinline int load_pipe(unsigned int n)
{
	u8 *block = kmalloc(LOAD_BLOCK, GFP_KERNEL);
	struct pipe_load load = { .blocks = n };
	struct task_struct *thread;
	struct file *ends[2];
	u32 sum = 0;
	ssize_t total;
	int error = block ? create_pipe_files(ends, 0) : -ENOMEM;

	if (error)
		goto out;
	load.writer = ends[1];
	thread = kthread_run(load_pipe_writer, &load, "load_pipe");
	if (IS_ERR(thread)) {
		fput(ends[1]);
		error = (int)PTR_ERR(thread);
	} else {
		total = read_all(ends[0], block, &sum);
		error = total == (ssize_t)n * LOAD_BLOCK ? load_result(sum) : -EIO;
	}
	fput(ends[0]);
out:
	kfree(block);
	return error;
}

struct file_load {
	char dir[40];
	char path[64], other[64];
	u8 block[LOAD_BLOCK];
	u32 sum;
};

static noinline int write_file(struct file_load *load, unsigned int number)
{
	struct file *file = filp_open(load->path, O_CREAT | O_WRONLY | O_TRUNC, 0644);
	ssize_t count;
	loff_t pos = 0;

	if (IS_ERR(file))
		return (int)PTR_ERR(file);
	load_fill(load->block, number);
	do
		count = kernel_write(file, load->block, LOAD_BLOCK, &pos);
	while (count == LOAD_BLOCK && pos < LOAD_BLOCK * (number % 8 + 1));
	fput(file);
	return count == LOAD_BLOCK ? 0 : -EIO;
}

static noinline int read_file(struct file_load *load, const char *path)
{
	struct file *file = filp_open(path, O_RDONLY, 0);
	ssize_t count;
	loff_t pos = 0;

	if (IS_ERR(file))
		return (int)PTR_ERR(file);
	while ((count = kernel_read(file, load->block, LOAD_BLOCK, &pos)) == LOAD_BLOCK)
		load->sum = load_sum(load->sum, load->block);
	fput(file);
	return (int)count;
}

/* Write, link, rename, read through the link, unlink. */
static noinline int use_file(struct file_load *load, unsigned int number)
{
	int error;

	snprintf(load->path, sizeof(load->path), "%s/file%u", load->dir, number);
	snprintf(load->other, sizeof(load->other), "%s/moved%u", load->dir, number);
	error = write_file(load, number);
	if (!error)
		error = do_renameat2(AT_FDCWD, getname_kernel(load->path), AT_FDCWD,
				     getname_kernel(load->other), 0);
	if (!error)
		error = do_symlinkat(getname_kernel(load->other), AT_FDCWD, getname_kernel(load->path));
	if (!error)
		error = read_file(load, load->path);
	do_unlinkat(AT_FDCWD, getname_kernel(load->path));
	do_unlinkat(AT_FDCWD, getname_kernel(load->other));
	return error;
}

/* n files of 1 to 8 KiB in a directory of /scratch, one after the other. */
noinline int load_files(unsigned int n)
{
	struct file_load *load = kzalloc(sizeof(*load), GFP_KERNEL);
	unsigned int i;
	int error;

	if (!load)
		return -ENOMEM;
	snprintf(load->dir, sizeof(load->dir), "/scratch/load.%d", current->pid);
	error = do_mkdirat(AT_FDCWD, getname_kernel(load->dir), 0700);
	for (i = 0; !error && i < n; i++)
		error = use_file(load, i);
	do_rmdir(AT_FDCWD, getname_kernel(load->dir));
	if (!error)
		error = load_result(load->sum);
	kfree(load);
	return error;
}
