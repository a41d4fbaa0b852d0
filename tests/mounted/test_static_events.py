"""Fork, exit, open, read and write on the mount, as events of the scheduler and of system calls show them."""

from __future__ import annotations

import os
import re
import subprocess

import pytest

from tests.fuse.harness import needs_fuse
from tests.mounted.files import TIMEOUT, Files

pytestmark = [needs_fuse, pytest.mark.mounted]


def test_available_events(files: Files) -> None:
    names = files.lines("tracing/available_events")
    assert {"sched:sched_switch", "kmem:kmalloc", "syscalls:sys_enter_openat", "timer:timer_start"} <= set(
        names
    )
    assert len(names) == len(set(names))
    assert files.read("tracing/events/sched/enable") == "0\n"


def test_a_child_from_fork_to_exit(files: Files) -> None:
    files.write("tracing/events/sched/enable", "1")
    look = "read -r line < machine/version"
    script = f"{look}; ({look}; exit 0); {look}; :"
    shell = subprocess.run(
        ["bash", "-c", f"echo $$; {script}"],
        cwd=files.root,
        stdout=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT,
        check=True,
    )
    pid = shell.stdout.split()[0]
    records = files.read("tracing/trace")
    forked = re.search(
        rf"bash-{pid} .*sched_process_fork: comm=bash pid={pid} child_comm=bash child_pid=(\d+)", records
    )
    assert forked, records
    child = forked[1]
    assert re.search(rf"bash-{child} .*sched_process_exit: comm=bash pid={child} prio=120", records)
    assert re.search(rf"sched_wakeup_new: comm=bash pid={child} prio=120 target_cpu=000", records)
    assert re.search(rf"sched_switch: .*prev_pid={child} prev_prio=120 prev_state=X ==> next_comm=", records)


def test_system_calls_of_a_client(files: Files) -> None:
    files.write("tracing/events/syscalls/enable", "1")
    script = "echo $$; echo text > scratch/note; read -r line < scratch/note; echo $line"
    shell = subprocess.run(
        ["bash", "-c", script], cwd=files.root, stdout=subprocess.PIPE, text=True, timeout=TIMEOUT, check=True
    )
    files.write("tracing/events/syscalls/enable", "0")
    pid, text = shell.stdout.split()
    assert text == "text"
    records = files.read("tracing/trace")
    for pattern in (
        r"sys_openat\(dfd: ffffff9c, filename: [0-9a-f]+, flags: [0-9a-f]+, mode: [0-9a-f]+\)",
        r"sys_openat -> 0x[0-9a-f]+",
        r"sys_p?write(64)?\(fd: [0-9a-f]+, buf: [0-9a-f]+, count: 5(, pos: 0)?\)",
        r"sys_p?write(64)? -> 0x5",
        r"sys_p?read(64)?\(fd: ",
    ):
        assert re.search(rf"bash-{pid} .*: {pattern}", records), (pattern, records)


def test_a_program_is_executed_by_its_path(files: Files) -> None:
    files.write("tracing/events/sched/sched_process_exec/enable", "1")
    command = ["/bin/sh", "-c", "cat machine/version; :"]
    subprocess.run(command, cwd=files.root, stdout=subprocess.PIPE, timeout=TIMEOUT, check=True)
    pattern = r"cat-(\d+) .*sched_process_exec: filename=(/usr)?/bin/cat pid=\1 old_pid=\1"
    assert re.search(pattern, files.read("tracing/trace"))


def test_a_filter_on_what_a_pointer_of_the_client_leads_to(files: Files) -> None:
    event = "tracing/events/syscalls/sys_enter_openat"
    counts = []
    wanted = f'filename.ustring == "{files.path("scratch/wanted")}"'
    for text in (wanted, 'filename.ustring ~ "*other"', 'filename ~ "*"'):
        files.write(f"{event}/filter", text)
        files.write(f"{event}/enable", "1")
        files.write("scratch/wanted", "x", os.O_CREAT)
        files.read("machine/version")
        files.write(f"{event}/enable", "0")
        counts.append(len(files.records()))
        files.write("tracing/trace", "", os.O_TRUNC)
    assert counts == [1, 0, 0]
