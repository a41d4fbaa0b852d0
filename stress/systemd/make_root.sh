#!/bin/sh
# Makes the root of the virtual machine, in a new root of scripts/fresh-root: kernel, systemd, the package, the
# checks. Prints it as a tar archive.
set -eu

exec 3>&1 >&2
export DEBIAN_FRONTEND=noninteractive
. /etc/os-release
case $ID in
ubuntu) kernel=linux-image-virtual ;;
*) kernel=linux-image-cloud-amd64 ;;
esac
install() { apt-get install -y -qq --no-install-recommends "$@" >/tmp/apt.log 2>&1 || { tail -n 5 /tmp/apt.log; exit 1; }; }
apt-get update -qq
# The kernel's installation makes the initial file system with the modules that a virtual machine needs.
install systemd systemd-sysv dbus udev kmod libpam-systemd dbus-user-session procps python3-venv initramfs-tools
install "$kernel" fuse3
scripts/package /tmp/package
install /tmp/package/*.deb

useradd -m -s /bin/bash -u 1000 u 2>/dev/null || {
    # Ubuntu's images have a user of that number.
    userdel -r "$(id -nu 1000)" 2>/dev/null
    useradd -m -s /bin/bash -u 1000 u
}
mkdir -p /var/lib/systemd/linger /mnt/f /mnt/auto
touch /var/lib/systemd/linger/u
echo fuse >/etc/modules-load.d/fuse.conf
cat >/etc/fstab <<'END'
/dev/vda / ext4 defaults 0 0
debugfs /mnt/f fuse.kprobefs arch=riscv64,nofail 0 0
debugfs /mnt/auto fuse.kprobefs x-systemd.automount,nofail 0 0
END
cp stress/systemd/guest.sh /opt/guest.sh
systemctl enable kprobefs.service
cat >/etc/systemd/system/checks.service <<'END'
[Unit]
After=multi-user.target
[Service]
Type=oneshot
ExecStart=/bin/bash -c "bash /opt/guest.sh 2>&1 | tee /result >/dev/ttyS0; sync; systemctl poweroff"
TimeoutStartSec=1800
END
cat >/etc/systemd/system/checks.timer <<'END'
[Timer]
OnBootSec=1
[Install]
WantedBy=timers.target
END
systemctl enable checks.timer
systemctl mask apt-daily.timer apt-daily-upgrade.timer e2scrub_all.timer dpkg-db-backup.timer
mkdir -p /usr/lib/systemd/system-shutdown
# Runs after all units have stopped and all file systems are unmounted or read-only.
cat >/usr/lib/systemd/system-shutdown/left <<'END'
#!/bin/sh
echo "SHUTDOWN: mounts of kprobefs that are left: $(grep -c ' fuse.kprobefs ' /proc/mounts)" >/dev/ttyS0
END
chmod +x /usr/lib/systemd/system-shutdown/left
# Without what scripts/fresh-root has mounted in it.
awk '$5 != "/" { print "." $5 "/*" }' /proc/self/mountinfo >/tmp/mounted
tar -c -C / --exclude-from=/tmp/mounted --exclude=./srv/* --exclude=./var/cache/* --exclude=./tmp/* \
    --exclude=./var/lib/apt/* --exclude='*/.cache' . >&3
