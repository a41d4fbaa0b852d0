"""Bad input: write(2) fails with Linux's errno, error_log has a caret at Linux's position, and nothing is
changed.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass

import pytest

from tests.fuse.harness import needs_fuse
from tests.mounted.files import EVENTS, Files, assert_errno

pytestmark = [needs_fuse, pytest.mark.mounted]


@dataclass(frozen=True)
class Bad:
    """A definition that the kernel must refuse, with the expected error."""

    definition: str
    errno: int
    message: str = ""
    """Message in error_log. If it is empty, nothing is logged."""
    caret: int = 0
    """Column of the caret, counted from the command's first character."""


DEFINITIONS = [
    Bad("p:a no_such_function", errno.ENOENT, "Invalid probed address or symbol", 4),
    Bad("p:a vfs_read+0x10000000", errno.ENOENT, "Invalid probed address or symbol", 4),
    Bad("p:a vfs_read+1", errno.EILSEQ, "Probe point is not an instruction boundary", 4),
    Bad("p:a do_host_interrupt", errno.EINVAL, "Failed to register probe event", 4),
    Bad("p:a init_task", errno.EINVAL, "Failed to register probe event", 4),
    Bad("p:a vfs_read %nothing", errno.EINVAL, "Invalid register name", 13),
    Bad("p:a-b vfs_read", errno.EINVAL, "Event name must follow the same rules as C identifiers", 2),
    Bad("p:a vfs_read x=%ax x=%bx", errno.EINVAL, "This argument name is already used", 19),
    Bad("p:a vfs_read $arg0", errno.EINVAL, "Invalid argument number", 13),
    Bad("p:a vfs_read x=%ax:u99", errno.EINVAL, "Unknown type is specified", 19),
    Bad("hello", errno.EINVAL),
    Bad("p", errno.EINVAL),
    Bad("-:nothing", errno.ENOENT),
    Bad("p:a vfs_read " + "x" * 4096, errno.EINVAL),
    Bad("p:a vfs_read\0", errno.EINVAL),
    Bad("\0", errno.EINVAL),
]


@pytest.mark.parametrize("bad", DEFINITIONS, ids=lambda bad: repr(bad.definition)[:40])
def test_definitions(bad: Bad, shared: Files) -> None:
    shared.probe("p:kept vfs_write")
    before = state(shared)
    with assert_errno(bad.errno):
        shared.write("kprobe_events", bad.definition + "\n")
    assert state(shared) == before
    log = shared.lines("tracing/error_log")
    if not bad.message:
        assert log == []
        return
    head, command, caret = log
    assert re.fullmatch(rf"\[ *\d+\.\d+\] trace_kprobe: error: {re.escape(bad.message)}", head)
    assert command == f"  Command: {bad.definition}"
    assert caret.index("^") == len("  Command: ") + bad.caret


def state(files: Files) -> tuple[str, ...]:
    """Return the content of all files that a failed write must not change."""
    names = ("kprobe_events", "kprobes/list", "kprobes/enabled", "tracing/events/enable")
    return (*(files.read(name) for name in names), *sorted(os.listdir(files.path(EVENTS))))


def test_a_truncated_line_is_a_line(files: Files) -> None:
    with assert_errno(errno.ENOENT):
        files.write("kprobe_events", "p:a vfs_re")
    with assert_errno(errno.EINVAL):
        files.write("kprobe_events", "ad\n")
    assert files.read("kprobe_events") == ""


def test_earlier_lines_of_a_failing_write_stay(files: Files) -> None:
    with assert_errno(errno.ENOENT):
        files.write("kprobe_events", "p:a vfs_read\np:b nothing\np:c vfs_write\n")
    assert files.read("kprobe_events") == "p:kprobes/a vfs_read\n"


READ_ONLY = [
    "kprobes/list",
    "kprobes/blacklist",
    "kprobe_profile",
    "machine/version",
    "machine/kallsyms",
    "machine/dmesg",
    "machine/tasks",
    "tracing/README",
    "tracing/available_events",
    f"{EVENTS}/a/format",
    f"{EVENTS}/a/id",
    "kprobes/stats/kprobes/a/reason",
]


@pytest.mark.parametrize("name", READ_ONLY)
def test_read_only_files(name: str, shared: Files) -> None:
    if os.geteuid() != 0:
        pytest.skip("for others than root open(2) fails already")
    shared.write("kprobe_events", "p:a vfs_read")
    before = shared.read(name)
    with assert_errno(errno.EINVAL):
        shared.write(name, "1")
    assert shared.read(name) == before or name == "machine/tasks"


@pytest.mark.parametrize(
    ("name", "data", "number"),
    [
        ("kprobes/enabled", "2", errno.EINVAL),
        ("kprobes/enabled", "", 0),
        (f"{EVENTS}/a/enable", "2", errno.EINVAL),
        (f"{EVENTS}/a/enable", "99999999999999999999999", errno.ERANGE),
        ("kprobes/stats/kprobes/a/hits", "1", errno.EINVAL),
        ("kprobes/stats/kprobes/a/optimized", "1", errno.EOPNOTSUPP),
        ("tracing/buffer_size_kb", "0", errno.EINVAL),
        ("tracing/buffer_size_kb", "99999999999", errno.ENOMEM),
        ("tracing/current_tracer", "magic", errno.EINVAL),
        ("tracing/tracing_on", "x", errno.EINVAL),
    ],
)
def test_values(name: str, data: str, number: int, shared: Files) -> None:
    shared.write("kprobe_events", "p:a vfs_read")
    if not number:
        assert shared.write(name, data) == 0
        return
    with assert_errno(number):
        shared.write(name, data)
    assert shared.read("kprobes/enabled") == "1\n"
    assert shared.read(f"{EVENTS}/a/enable") == "0\n"


def test_names_that_are_not_there(files: Files) -> None:
    for name in ("nothing", "kprobes/nothing", "tracing/events/nothing/enable", f"{EVENTS}/nothing/enable"):
        with assert_errno(errno.ENOENT):
            os.open(files.path(name), os.O_WRONLY)
    for name in ("new", "kprobes/new", "tracing/new", "machine/new"):
        with assert_errno(errno.EACCES):
            os.open(files.path(name), os.O_WRONLY | os.O_CREAT, 0o644)
        with assert_errno(errno.EPERM):
            os.mkdir(files.path(name))
    with assert_errno(errno.EPERM):
        os.unlink(files.path("kprobe_events"))
    with assert_errno(errno.EPERM):
        os.rename(files.path("kprobe_events"), files.path("other"))


def test_removing_what_is_in_use(files: Files) -> None:
    files.probe("p:a vfs_read")
    with assert_errno(errno.EBUSY):
        files.write("kprobe_events", "-:a\n")
    with assert_errno(errno.EBUSY):
        os.open(files.path("kprobe_events"), os.O_WRONLY | os.O_TRUNC)
    assert files.read("kprobe_events") == "p:kprobes/a vfs_read\n"


def test_nothing_more_works_on_a_removed_event(files: Files) -> None:
    files.write("kprobe_events", "p:a vfs_read")
    descriptor = os.open(files.path(f"{EVENTS}/a/enable"), os.O_RDWR)
    files.write("kprobe_events", "-:a")
    for operation in (lambda: os.read(descriptor, 10), lambda: os.write(descriptor, b"1")):
        with assert_errno(errno.ENODEV):
            operation()
    os.close(descriptor)
