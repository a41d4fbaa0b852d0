#!/bin/bash
# The checks, in the virtual machine, as root, after multi-user.target. Each prints `ok WHAT` or `FAILED WHAT`.
mount=/run/kprobefs/mnt
state=/var/lib/kprobefs

# check WHAT FUNCTION: runs the function, each of whose commands must succeed.
check() {
    output=$(
        exec 2>&1
        set -ex
        "$2"
    )
    case $? in
    0) echo "ok $1" ;;
    *) printf 'FAILED %s\n%s\n' "$1" "$(tail -n 25 <<<"$output")" ;;
    esac
}

main_pid() { systemctl show -p MainPID --value kprobefs; }

# eventually COMMAND...: tries it for two minutes; the machine is emulated.
eventually() {
    { set +x; } 2>/dev/null
    local end=$((SECONDS + 120))
    until "$@"; do
        [ "$SECONDS" -lt "$end" ] || return 1
        sleep 0.5
    done
    set -x
}

# The pid is asked for first: the state may be the former daemon's.
has_new_daemon() { [ "$(main_pid)" != "$1" ] && [ "$(systemctl is-active kprobefs)" = active ]; }

is_unmounted() { ! findmnt -t fuse.kprobefs "$1" >/dev/null; }

daemon_of() { kprobefs status --json "$1" | python3 -c 'import json, sys; print(json.load(sys.stdin)[0]["daemon"]["pid"])'; }

service_at_boot() {
    systemctl is-active --quiet kprobefs
    [ "$(systemctl show -p NRestarts --value kprobefs)" = 0 ]
    findmnt -t fuse.kprobefs "$mount"
}

probes_and_records() {
    cd "$mount"
    # shellcheck disable=SC2016 # the definition's own variable
    echo 'p:a vfs_read c=$arg3' >>kprobe_events
    echo 1 >tracing/events/kprobes/a/enable
    echo hi >scratch/f
    cat scratch/f
    grep ' a: (vfs_read' tracing/trace
}

fstab_at_boot() {
    systemctl is-active --quiet mnt-f.mount
    grep 'Linux version' /mnt/f/machine/version
}

automount() {
    systemctl is-active --quiet mnt-auto.automount
    timeout 60 ls /mnt/auto | grep -x tracing
    systemctl is-active --quiet mnt-auto.mount
}

automount_again() {
    umount /mnt/auto
    eventually is_unmounted /mnt/auto
    timeout 60 ls /mnt/auto | grep -x tracing
}

reload() {
    mkdir -p /etc/kprobefs/probes.d
    echo 'p:second vfs_write' >/etc/kprobefs/probes.d/two.probes
    systemctl reload kprobefs
    grep second "$mount/kprobe_events"
}

kill_9() {
    pid=$(main_pid)
    kill -9 "$pid"
    eventually has_new_daemon "$pid"
    grep 'a vfs_read' "$mount/kprobe_events"
    grep ' a: (vfs_read' "$mount/tracing/instances/last/trace"
}

kill_9_of_fstab() {
    kill -9 "$(daemon_of /mnt/f)"
    eventually is_unmounted /mnt/f
    ls -A /mnt/f
    systemctl start mnt-f.mount
    grep 'Linux version' /mnt/f/machine/version
}

kill_9_of_automount() {
    kill -9 "$(daemon_of /mnt/auto)"
    eventually is_ended mnt-auto.mount
    timeout 60 ls /mnt/auto | grep -x tracing
}

is_ended() { [ "$(systemctl is-active "$1")" = inactive ]; }

stop_under_a_client() {
    echo hi >"$mount/scratch/f"
    (
        cd "$mount/scratch"
        exec 3<f
        sleep 8
    ) &
    sleep 1
    systemctl stop kprobefs
    is_unmounted "$mount"
    systemctl is-failed kprobefs && exit 1
    wait
    systemctl start kprobefs
}

watchdog() {
    pid=$(main_pid)
    kill -STOP "$pid"
    eventually has_new_daemon "$pid"
    timeout 30 cat "$mount/kprobes/enabled"
}

# A stopped daemon that no watchdog looks at goes on where it was.
stop_and_continue() {
    pid=$(daemon_of /mnt/f)
    kill -STOP "$pid"
    [ "$(kprobefs status /mnt/f | cut -d ' ' -f 1)" = hung ]
    kill -CONT "$pid"
    timeout 30 cat /mnt/f/kprobes/enabled
}

wrong_options() {
    echo 'KPROBEFS_OPTIONS=--nonsense' >/etc/default/kprobefs
    systemctl restart kprobefs && exit 1
    sleep 2
    systemctl is-failed kprobefs
    [ "$(systemctl show -p NRestarts --value kprobefs)" = 0 ]
    [ "$(systemctl show -p ExecMainStatus --value kprobefs)" = 2 ]
    echo 'KPROBEFS_OPTIONS=' >/etc/default/kprobefs
    systemctl reset-failed kprobefs
    systemctl start kprobefs
}

template() {
    mkdir -p '/mnt/k p'
    systemctl start "$(systemd-escape --path --template=kprobefs@.service '/mnt/k p')"
    grep 'Linux version' '/mnt/k p/machine/version'
}

has_bus() { [ -S /run/user/1000/bus ]; }

user_unit() {
    eventually has_bus
    as_user='export XDG_RUNTIME_DIR=/run/user/1000; systemctl --user'
    su u -c "$as_user start kprobefs"
    su u -c "grep 'Linux version' /run/user/1000/kprobefs/mnt/machine/version"
    pid=$(su u -c "$as_user show -p MainPID --value kprobefs")
    kill -9 "$pid"
    eventually su u -c "! [ \$($as_user show -p MainPID --value kprobefs) = $pid ] && $as_user is-active kprobefs"
    su u -c "grep 'Linux version' /run/user/1000/kprobefs/mnt/machine/version"
}

fill() { dd if=/dev/zero of="$state/ballast" bs=4096 2>/dev/null || true; }

# Leaves a small file system under the state directory.
full_disk_at_start() {
    systemctl stop kprobefs
    command mount -t tmpfs -o size=16m,mode=755 tmpfs "$state"
    mkdir "$state/mnt"
    fill
    systemctl start kprobefs
    grep 'kept no' "$mount/machine/state"
    echo 'p:still vfs_read' >>"$mount/kprobe_events"
    grep still "$mount/kprobe_events"
}

full_disk_in_the_run() {
    systemctl stop kprobefs
    rm "$state/ballast"
    systemctl start kprobefs
    grep 'kept yes' "$mount/machine/state"
    fill
    pid=$(main_pid)
    for number in $(seq 200); do
        echo "p:more$number vfs_read" >>"$mount/kprobe_events"
    done
    [ "$(main_pid)" = "$pid" ]
    grep 'kept no' "$mount/machine/state"
    rm "$state/ballast"
    sleep 2
    # The next change is kept, with all earlier ones.
    echo 'p:last vfs_read' >>"$mount/kprobe_events"
    grep 'kept yes' "$mount/machine/state"
    kill -9 "$pid"
    eventually has_new_daemon "$pid"
    grep more200 "$mount/kprobe_events"
    grep last "$mount/kprobe_events"
}

exposure() { systemd-analyze security kprobefs --no-pager | tail -n 1 | grep ': 3\.[0-3] '; }

no_faults() { ! journalctl -b -o cat | grep -E 'Traceback|internal fault'; }

. /etc/os-release
echo "# $PRETTY_NAME, Linux $(uname -r), systemd $(systemctl --version | awk 'NR == 1 { print $2 }'), $(kprobefs --version)"
check 'service at boot' service_at_boot
check 'probes and records' probes_and_records
check 'fstab at boot' fstab_at_boot
check 'automount' automount
check 'automount, again after umount' automount_again
check 'reload' reload
check 'kill -9 of the service' kill_9
check 'kill -9 of a mount of fstab' kill_9_of_fstab
check 'kill -9 of an automount' kill_9_of_automount
check 'stop while a client holds the mount' stop_under_a_client
check 'watchdog after SIGSTOP' watchdog
check 'SIGSTOP and SIGCONT without a watchdog' stop_and_continue
check 'wrong options' wrong_options
check 'template with a blank in its path' template
check "a user's unit" user_unit
check 'full disk at the start' full_disk_at_start
check 'full disk in the run' full_disk_in_the_run
check 'exposure' exposure
check 'no internal fault in the journal' no_faults
echo "# mounts of kprobefs before the shutdown: $(grep -c ' fuse.kprobefs ' /proc/mounts)"
