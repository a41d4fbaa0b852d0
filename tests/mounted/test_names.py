"""Names of events and instances on a real mount: the host's kernel caches a name until the mount ends it."""

from __future__ import annotations

import errno
import os
import subprocess
from pathlib import Path

import pytest

from tests.fuse.harness import eventually, needs_fuse
from tests.mounted.files import EVENTS, TIMEOUT, Files, assert_errno
from tests.sample import fewer

pytestmark = [needs_fuse, pytest.mark.mounted]

PER_EVENT = (f"{EVENTS}/reads", "kprobes/stats/kprobes/reads")
GROUPS = (EVENTS, "kprobes/stats/kprobes")
BELOW = {PER_EVENT[0]: ("enable", "filter"), PER_EVENT[1]: ("hits", "mode")}


def use(files: Files) -> list[Path]:
    """Look up the names of an event's files until the host's kernel caches them.

    Return the paths, the deepest first.
    """
    names = [files.path(f"{top}/{name}") for top, below in BELOW.items() for name in below]
    names += [files.path(name) for name in (*PER_EVENT, *GROUPS)]
    for _ in range(3):
        for name in names:
            name.stat()
            if name.is_file():
                name.read_bytes()
    return names


def assert_gone(names: list[Path]) -> None:
    """Assert that the host's kernel does not cache the names `names`.

    If a name were cached, its removal by the wrong call, rmdir(2) or unlink(2), would not fail with ENOENT.
    """
    for name in names:
        is_file = any(name.name in below for below in BELOW.values())
        with assert_errno(errno.ENOENT):
            os.rmdir(name) if is_file else os.unlink(name)
    for name in names:
        with pytest.raises(OSError, match=rf"Errno ({errno.EPERM}|{errno.ENOENT})\b"):
            name.mkdir()
        with pytest.raises(OSError, match=rf"Errno ({errno.EACCES}|{errno.ENOENT})\b"):
            os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        assert not os.access(name, os.F_OK)
        with assert_errno(errno.ENOENT):
            os.chdir(name)


@pytest.mark.parametrize(
    ("removal", "flags"),
    [
        ("-:reads\n", os.O_APPEND),
        ("-:kprobes/reads\n", os.O_APPEND),
        ("", os.O_TRUNC),
        ("p:other/a vfs_write\n", os.O_TRUNC),
    ],
    ids=["by name", "by group", "all", "for another"],
)
def test_names_of_removed_events_are_gone_at_once(shared: Files, removal: str, flags: int) -> None:
    for _ in range(2):
        shared.write("kprobe_events", "p:reads vfs_read\n")
        names = use(shared)
        shared.write("kprobe_events", removal, flags)
        assert_gone(names)
        shared.write("kprobe_events", "", os.O_TRUNC)


def test_names_that_a_dynamic_events_file_removes_are_gone_at_once(shared: Files) -> None:
    shared.write("kprobe_events", "p:reads vfs_read\n")
    names = use(shared)
    shared.write("tracing/dynamic_events", "-:kprobes/reads\n")
    assert_gone(names)


def test_a_new_event_has_its_own_files(shared: Files) -> None:
    """If a removed return probe's name is used for a new probe, the probe has its own files.

    The file `active` is missing, which only return probes have.
    """
    shared.write("kprobe_events", "r:reads vfs_read\n")
    active = shared.path("kprobes/stats/kprobes/reads/active")
    for _ in range(3):
        assert active.read_text()
    inode = active.parent.stat().st_ino
    shared.write("kprobe_events", "-:reads\np:reads vfs_read\n")
    with assert_errno(errno.ENOENT):
        active.rmdir()
    assert not active.exists()
    assert active.parent.stat().st_ino != inode
    assert shared.read("kprobes/stats/kprobes/reads/hits") == "0\n"
    shared.write("kprobe_events", "-:reads\n")


def test_attributes_are_never_those_of_before(shared: Files) -> None:
    """The host's kernel caches names, but always gets the current mode, owner and number of links from the
    mount.
    """
    shared.write("kprobe_events", "p:reads vfs_read\n")
    group = shared.path(EVENTS)
    enable = group / "reads/enable"
    enable.stat()
    for number, mode in enumerate((0o600, 0o640, 0o644)):
        enable.chmod(mode)
        assert enable.stat().st_mode & 0o777 == mode
        links = group.stat().st_nlink
        shared.write("kprobe_events", f"p:further{number} vfs_write\n")
        assert group.stat().st_nlink == links + 1


def test_a_process_in_a_removed_directory(shared: Files) -> None:
    """In a removed directory, a process finds no files. The process can still ask for its working
    directory.
    """
    shared.write("kprobe_events", "p:reads vfs_read\n")
    script = "cat hits; read _; cat hits; pwd -P"
    inside = subprocess.Popen(
        ["sh", "-c", script],
        cwd=shared.path(PER_EVENT[1]),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert inside.stdout is not None
    assert inside.stdout.readline() == "0\n"
    shared.write("kprobe_events", "-:reads\n")
    output, _ = inside.communicate("\n", timeout=TIMEOUT)
    assert output.count("No such file") == 1
    assert str(shared.path(PER_EVENT[1])) in output or "getcwd" in output


def test_a_removed_instance_can_be_made_again(shared: Files) -> None:
    """Files of a removed instance are not taken for the files of a new instance with the same name."""
    path = shared.path("tracing/instances/one")
    for clock in ("global", "counter", "uptime"):
        path.mkdir()
        for _ in range(3):
            (path / "trace_clock").read_text()
            (path / "events/sched").stat()
        (path / "trace_clock").write_text(clock)
        assert f"[{clock}]" in (path / "trace_clock").read_text()
        path.rmdir()
        assert not (path / "trace_clock").exists()
        assert not path.exists()


def test_names_of_events_that_a_rebooted_kernel_removes(files: Files) -> None:
    """A reboot keeps events and instances. Their names then belong to objects of the new kernel, and end when
    these objects are removed.
    """
    files.write("kprobe_events", "p:reads vfs_read\n")
    instance = files.path("tracing/instances/one")
    instance.mkdir()
    (instance / "trace").read_text()
    for _ in range(2):
        names = use(files)
        files.write("machine/power", "reboot\n")
        with assert_errno(errno.EEXIST):
            names[-1].mkdir()
        names = use(files)
        files.write("kprobe_events", "", os.O_TRUNC)
        assert_gone(names)
        instance.rmdir()
        instance.mkdir()
        files.write("kprobe_events", "p:reads vfs_read\n")


def test_the_guest_sees_calls_that_end_with_a_name_that_was_kept(files: Files) -> None:
    """rmdir(2) of a file is also a call of the guest while a probe is on do_rmdir.

    The host's kernel could fail the call by the cached name alone.
    """
    if not Path("/proc/self/syscall").exists():
        pytest.skip("/proc doesn't say in which system call a process waits")
    names = ["kprobes/list", "tracing/events/enable", "tracing/trace"]
    for _ in range(3):
        for name in names:
            files.path(name).stat()
    files.write("kprobe_events", "p:made do_rmdir\n")
    for _ in range(2):
        files.write(f"{EVENTS}/made/enable", "1")
        files.write("tracing/trace", "", os.O_TRUNC)
        script = 'for name; do rmdir "$name" && exit 1; done; true'
        subprocess.run(["sh", "-c", script, "sh", *names], cwd=files.root, timeout=TIMEOUT, check=True)
        assert sum(": made: " in line for line in files.records()) == len(names)
        files.write(f"{EVENTS}/made/enable", "0")
        for name in names:
            files.path(name).stat()


def test_clients_that_look_up_while_names_end(shared: Files) -> None:
    """Removed names are gone at once, even if other clients list the directories and make entries."""
    script = "while :; do ls -lR tracing/events/kprobes kprobes/stats; mkdir tracing/events/kprobes/x; done"
    others = [
        subprocess.Popen(
            ["sh", "-c", script], cwd=shared.root, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for _ in range(3)
    ]
    try:
        for number in range(fewer(60, 3)):
            shared.write("kprobe_events", f"p:reads vfs_read\np:e{number} vfs_write\n")
            names = use(shared)
            if number % 2:
                shared.write(f"{EVENTS}/reads/enable", "1")
                shared.write(f"{EVENTS}/reads/enable", "0")
            shared.write("kprobe_events", f"-:reads\n-:e{number}\n")
            assert_gone(names)
    finally:
        for other in others:
            other.kill()
            other.wait(TIMEOUT)
    eventually(lambda: shared.read("kprobe_events") == "")
