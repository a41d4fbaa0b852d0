"""Names that a front end may keep, reports of their end, and open files whose close has an effect."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.vfs.core.command_file import SPLIT_SIZE
from emulated_kernel.vfs.mount import Mount
from tests.vfs.files import ROOT

EVENT = "/tracing/events/kprobes/reads"
STATS = "/kprobes/stats/kprobes/reads"


class Ends:
    """A collector of the ends of names that a mount reports.

    The collector checks that the control lock is free at each report.
    """

    def __init__(self, mount: Mount) -> None:
        self._mount = mount
        self._found: list[str | None] = []
        mount.at_names_end(self._end)

    def _end(self, ends: Collection[str | None]) -> None:
        with pytest.raises(AssertionError):
            self._mount.lock.assert_held()
        self._found += ends

    def take(self) -> list[str | None]:
        """Return the reported ends of names since the last call."""
        found, self._found = self._found, []
        return found


@pytest.fixture
def kernel(strict_lock: None) -> Iterator[Kernel]:
    del strict_lock
    with Kernel() as kernel:
        yield kernel


@pytest.fixture
def mount(kernel: Kernel) -> Iterator[Mount]:
    mount = kernel.mount()
    yield mount
    mount.close()


def write(mount: Mount, path: str, text: str, flags: int = os.O_APPEND) -> None:
    handle = mount.open(ROOT, path, os.O_WRONLY | flags)
    try:
        mount.write(ROOT, handle, text.encode(), 0)
    finally:
        mount.release(handle)


def test_names_of_the_kernel_last_and_those_of_clients_do_not(mount: Mount) -> None:
    write(mount, "/kprobe_events", "p:reads vfs_read\n")
    mount.mkdir(ROOT, "/tracing/instances/one", 0o755)
    for path in (
        "/kprobe_events",
        "/kprobes",
        EVENT,
        f"{EVENT}/enable",
        STATS,
        "/tracing/instances/one/trace",
    ):
        assert mount.is_control(path)
        assert mount.name_lasts(path)
    for path in ("/tracing/instances/one", "/scratch", "/dev/null", f"{EVENT}/none", "/tracing/trace/below"):
        assert not mount.name_lasts(path)
    assert not mount.is_control("/scratch/file")


@pytest.mark.parametrize(
    ("probed", "sees_lookups"),
    [("vfs_read", False), ("vfs_write", False), ("vfs_open", True), ("filp_close", True)],
)
def test_no_name_lasts_while_the_guest_sees_lookups(mount: Mount, probed: str, sees_lookups: bool) -> None:
    """Names of files last while an event is enabled, unless lookups can execute the probed function.

    A lookup executes vfs_open and filp_close, but not vfs_read.
    """
    write(mount, "/kprobe_events", f"p:reads {probed}\n")
    ends = Ends(mount)
    for _ in range(2):
        write(mount, f"{EVENT}/enable", "1")
        assert ends.take() == [None] * sees_lookups
        assert mount.name_lasts(f"{EVENT}/enable") is not sees_lookups
        write(mount, f"{EVENT}/enable", "0")
        assert ends.take() == []
        assert mount.name_lasts(f"{EVENT}/enable")


def test_each_removal_is_reported_when_the_lock_is_free(mount: Mount) -> None:
    ends = Ends(mount)
    write(mount, "/kprobe_events", "p:reads vfs_read\nr:other/returns vfs_read\np:writes vfs_write\n")
    assert ends.take() == []
    write(mount, "/kprobe_events", "-:reads\n-:other/returns\n")
    assert ends.take() == ["kprobes/reads", "other/returns"]
    write(mount, "/kprobe_events", "", os.O_TRUNC)
    assert ends.take() == ["kprobes/writes"]
    write(mount, "/tracing/synthetic_events", "made int x\n")
    write(mount, "/tracing/synthetic_events", "!made\n")
    assert ends.take() == ["synthetic/made"]


def test_a_path_leads_to_what_is_there_now(kernel: Kernel, mount: Mount) -> None:
    """A path leads to the present file, even if a client or the kernel has removed the file of an earlier
    lookup and made another.
    """

    def inodes(*paths: str) -> list[int]:
        return [mount.getattr(path).ino for _ in range(2) for path in paths]

    paths = (EVENT, f"{EVENT}/enable", STATS, f"{STATS}/hits")
    found = []
    for letter in "pr":
        write(mount, "/kprobe_events", f"{letter}:reads vfs_read\n")
        found.append(inodes(*paths))
        assert mount.exists(f"{STATS}/active") == (letter == "r")
        write(mount, "/kprobe_events", "-:reads\n")
        assert not any(mount.exists(path) for path in (*paths, f"{STATS}/active", "/kprobes/stats/kprobes"))
    assert set(found[0]).isdisjoint(found[1])
    instance = "/tracing/instances/one"
    for _ in range(2):
        mount.mkdir(ROOT, instance, 0o755)
        inodes(instance, f"{instance}/trace")
        with kernel.lock:
            kernel.trace_arrays.remove("one")
        assert not mount.exists(instance)
        assert not mount.exists(f"{instance}/trace")


@pytest.mark.parametrize(
    ("path", "flags", "acts"),
    [
        ("/tracing/trace_pipe", os.O_RDONLY, True),
        ("/tracing/trace", os.O_RDONLY, True),
        ("/tracing/trace", os.O_WRONLY, False),
        ("/tracing/snapshot", os.O_RDONLY, True),
        ("/tracing/set_ftrace_filter", os.O_WRONLY, True),
        ("/kprobe_events", os.O_WRONLY, False),
        (f"{STATS}/hits", os.O_RDONLY, False),
    ],
)
def test_a_close_with_an_effect_is_known_at_the_open(mount: Mount, path: str, flags: int, acts: bool) -> None:
    """At open, the mount knows whether the close of the file will have an effect.

    For example, trace_pipe can be opened again only after its close.
    """
    write(mount, "/kprobe_events", "p:reads vfs_read\n")
    handle = mount.open(ROOT, path, flags)
    assert (handle in mount.acting) == acts
    mount.release(handle)
    assert handle not in mount.acting


def test_a_close_that_executes_a_part_of_a_line_is_known_after_the_write(mount: Mount) -> None:
    handle = mount.open(ROOT, "/kprobe_events", os.O_WRONLY)
    assert mount.write(ROOT, handle, b"p:one vfs_read\n", 0) == 15
    assert handle not in mount.acting
    part = b"# filler\n" * (SPLIT_SIZE // 9 + 1) + b"p:two vfs_re"
    assert mount.write(ROOT, handle, part, 15) == len(part)
    assert handle in mount.acting
    assert mount.write(ROOT, handle, b"ad\n", 15 + len(part)) == 3
    mount.release(handle)
    assert handle not in mount.acting
