#!/bin/bash
# Becomes the first process of a pid namespace and runs a real systemd there, on the units in directory $1.
# A target of our own keeps sysinit (udev, tmpfiles cleaning) away from the host.
set -e
mount --make-rprivate /
mount -t tmpfs tmpfs /run
sh "${0%/*}/own_devices.sh" /run/devices
mount -t tmpfs tmpfs /var/lib
mkdir -p /run/systemd/system /run/lock
umount -R -l /sys/fs/cgroup
mount -t cgroup2 cgroup2 /sys/fs/cgroup
cp "$1"/*.service /run/systemd/system/
printf '[Unit]\nDefaultDependencies=no\n' > /run/systemd/system/kprobefs-test.target
exec env -i PATH="$PATH" container=unshare /usr/lib/systemd/systemd --system --unit=kprobefs-test.target \
    --show-status=no --log-target=console
