/* SPDX-License-Identifier: GPL-2.0-or-later */
/* Devices, and what sysfs shows of them. */
#ifndef _DEVICE_H
#define _DEVICE_H

#include "types.h"

struct device {
	const char *name;
	const char *driver;
};

struct device_attribute {
	const char *name;
	umode_t mode;
	ssize_t (*show)(struct device *dev, struct device_attribute *attr, char *buf);
};

#define DEVICE_ATTR_RO(_name) { .name = #_name, .mode = 0444, .show = _name##_show }

extern const struct device_attribute rtc_attrs[];
extern const struct device_attribute uio_attrs[];

#endif
