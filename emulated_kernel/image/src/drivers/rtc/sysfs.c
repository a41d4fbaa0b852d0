// SPDX-License-Identifier: GPL-2.0-or-later
// Attributes of a real-time clock.
#include "device.h"
#include "printk.h"

static ssize_t name_show(struct device *dev, struct device_attribute *attr, char *buf)
{
	(void)attr;
	return sprintf(buf, "%s %s\n", dev->driver, dev->name);
}

const struct device_attribute rtc_attrs[] = { DEVICE_ATTR_RO(name), {} };
