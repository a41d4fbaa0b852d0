// SPDX-License-Identifier: GPL-2.0-or-later
// Attributes of a device that a program drives.
#include "device.h"
#include "printk.h"

static ssize_t name_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	(void)attr;
	return sprintf(buf, "%s\n", dev->name);
}

const struct device_attribute uio_attrs[] = { DEVICE_ATTR_RO(name), {} };
