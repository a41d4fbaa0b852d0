/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Device numbers, and the drivers behind them. */
#ifndef _CHRDEV_H
#define _CHRDEV_H

#include "types.h"

#define MINORBITS 20
#define MAJOR(dev) ((unsigned int)((dev) >> MINORBITS))
#define MINOR(dev) ((unsigned int)((dev) & ((1U << MINORBITS) - 1)))
#define MKDEV(ma, mi) (((dev_t)(ma) << MINORBITS) | (mi))
#define MEM_MAJOR 1

struct file_operations;

int register_chrdev(unsigned int major, const char *name, const struct file_operations *fops);
void chr_dev_init(void);

#endif
