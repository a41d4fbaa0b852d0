"""A guest that faults, loops or panics: the writer of the call gets an error, and the mount still works."""

from __future__ import annotations

import errno
import os
import time
from contextlib import suppress

import pytest

from kprobefs.common.mountpoints import MountState, condition
from tests.fuse.harness import Daemon, eventually, needs_fuse
from tests.mounted.files import EVENTS, Files, assert_errno

pytestmark = [needs_fuse, pytest.mark.mounted]


def assert_all_works(files: Files) -> None:
    """Assert that each part of the mount that uses the guest works: calls, files in scratch/, and probes."""
    files.path("scratch/check").write_text("content")
    assert files.path("scratch/check").read_text() == "content"
    files.write("machine/call", 'strlen "seven b"')
    assert files.read("machine/call") == "strlen = 0x7 (7)\n"
    files.probe("p:after vfs_unlink")
    files.path("scratch/check").unlink()
    assert any(" after: " in line for line in files.records())
    files.write(f"{EVENTS}/after/enable", "0")
    files.write("kprobe_events", "-:after")


def test_a_null_pointer_oopses(files: Files) -> None:
    with assert_errno(errno.EFAULT):
        files.write("machine/call", "strlen 0")
    log = files.read("machine/dmesg")
    assert "BUG: kernel NULL pointer dereference, address: 0000000000000000" in log
    assert "RIP: 0010:strlen+0x" in log
    assert "Comm: kprobefs" in log
    assert files.read("machine/call") == "strlen: the call was killed; see machine/dmesg\n"
    assert_all_works(files)


def test_a_wild_pointer_oopses(files: Files) -> None:
    with assert_errno(errno.EFAULT):
        files.write("machine/call", "memset 0xffff900000000000 1 4096")
    assert "BUG: unable to handle page fault for address: ffff900000000000" in files.read("machine/dmesg")
    assert_all_works(files)


def test_a_loop_is_ended(files: Files) -> None:
    # The lock looks held, and nobody releases it.
    with assert_errno(errno.EFAULT):
        files.write("machine/call", '_raw_spin_lock "held"')
    assert "soft lockup" in files.read("machine/dmesg")
    assert_all_works(files)


@pytest.mark.parametrize(
    ("call", "log"),
    [
        ('sort "cba" 3 1 0 0', "RIP: 0010:0x0"),
        ('sort "cba" 3 1 0xffffffff82000000 0', "Oops: 0010"),
        ("sort 0xffff888001000000 100000000 8 0 0", "Oops: "),
        ("do_exit 0", ""),
        ("make_task_dead 11", ""),
    ],
)
def test_a_wild_call_ends_alone(call: str, log: str, files: Files) -> None:
    """A call that jumps nowhere or to data, walks over all memory, or ends its own task fails with EFAULT.

    Everything else works afterwards.
    """
    with assert_errno(errno.EFAULT):
        files.write("machine/call", call)
    assert log in files.read("machine/dmesg")
    assert_all_works(files)


@pytest.mark.slow
@pytest.mark.parametrize(
    "call",
    [
        "host_hypercall 5 0 0 0 0",
        "host_hypercall 2 0 0 0 0",
        "host_hypercall 77 0 0 0 0",
        "host_idle 0",
        "host_park 8",
        "schedule",
        "memset 0xffffffff82000000 0xff 0x100000",
        "memset 0xffff888001060000 0xff 0x2000000",
        "wake_up_new_task 0xffffffff81000000",
        'local_bh_disable\n_raw_spin_lock_irqsave "held"',
    ],
)
def test_whatever_becomes_of_the_guest_the_mount_answers(call: str, files: Files) -> None:
    """Calls that damage the guest do not hang the mount: requests to the guest may fail with EIO, and control
    files are answered in time.
    """
    files.probe("p:reads vfs_read")
    started = time.monotonic()
    with suppress(OSError):
        files.write("machine/call", call)
    for name in ("machine/tasks", "machine/cpus", "machine/meminfo", "machine/dmesg", "scratch/none"):
        with suppress(OSError):
            files.read(name)
    with suppress(OSError):
        files.path("scratch/file").write_text("content")
    for name in ("kprobes/list", "kprobe_events", "machine/version", "machine/clock", "tracing/trace"):
        assert files.read(name)
    assert time.monotonic() - started < 45
    files.write(f"{EVENTS}/reads/enable", "0")
    assert files.shell("> kprobe_events; cat kprobes/list").stdout == ""


def test_earlier_results_of_a_failing_write_are_kept_apart(files: Files) -> None:
    with assert_errno(errno.EFAULT):
        files.write("machine/call", 'strlen "one"\nstrlen 0\nstrlen "never"\n')
    first, second = files.lines("machine/call")
    assert first == "strlen = 0x3 (3)"
    assert second.startswith("strlen: ")


def test_many_oopses(files: Files) -> None:
    for _ in range(50):
        with assert_errno(errno.EFAULT):
            files.write("machine/call", "strlen 0")
    assert_all_works(files)


def test_a_panic_leaves_control_files(files: Files) -> None:
    files.path("scratch/file").write_text("gone with the guest")
    files.probe("p:a vfs_read x=%di")
    pipe = os.open(files.path("tracing/trace_pipe"), os.O_RDONLY | os.O_NONBLOCK)
    kept = os.open(files.path("scratch/file"), os.O_RDONLY)
    os.read(kept, 1)
    with assert_errno(errno.EFAULT):
        files.write("machine/call", 'panic "no reason"')
    assert files.lines("machine/dmesg")[-1].endswith("Kernel panic - not syncing: no reason")
    eventually(lambda: condition(str(files.root)) is MountState.PANICKED)
    for name in ("kprobes/list", "kprobe_events", "machine/tasks", "kprobes/stats/kprobes/a/bytes"):
        assert files.read(name)
    assert os.read(pipe, 100)
    with assert_errno(errno.EIO):
        files.path("scratch/file").read_text()
    with assert_errno(errno.EIO):
        os.read(kept, 10)
    with assert_errno(errno.EIO):
        files.write("machine/call", 'strlen "a"')
    files.write("kprobe_events", "p:b vfs_write")
    files.write(f"{EVENTS}/b/enable", "1")
    files.write(f"{EVENTS}/enable", "0")
    assert files.shell("> kprobe_events; cat kprobe_events kprobes/list").stdout == ""
    os.close(kept)
    os.close(pipe)


def test_a_loop_full_of_probes_is_ended_too(mounted: Daemon, files: Files) -> None:
    """A loop with a probe on each instruction is ended, too, and soon.

    If the budget of the run ends in the middle of a single step, the run is stopped a little later.
    """
    for offset in range(64):
        with suppress(OSError):
            files.write("kprobe_events", f"p:p{offset} _raw_spin_lock+{offset}\n")
    files.write(f"{EVENTS}/enable", "1")
    before = mounted.cpu_seconds
    with assert_errno(errno.EFAULT):
        files.write("machine/call", '_raw_spin_lock "held"')
    assert mounted.cpu_seconds - before < 4
    files.write(f"{EVENTS}/enable", "0")
    files.shell("> kprobe_events")
    assert_all_works(files)
