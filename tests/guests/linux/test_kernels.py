"""Tests with several of Debian's kernels that the other tests do not use."""

from __future__ import annotations

import errno
import os
import re
import select
import stat
from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.detect_interface import profile_of
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux import debian_kernel
from tests.guests.linux.files import Files
from tests.guests.linux.parts import guest_of
from tests.oracle.inside.mount_files import read, write

pytestmark = pytest.mark.usefixtures("objects_excluded")

SHELL, OTHER = Client(4001, 0, 0), Client(4002, 1000, 1000)


class Kernel(NamedTuple):
    """A kernel's package, a pattern of its release, and the errno for a probe on an unknown function."""

    meta: str
    suite: str
    release: str
    unknown_symbol: str
    """Name of the errno for a probe on an unknown function."""


KERNELS = (
    Kernel("linux-image-cloud-amd64", "bullseye", r"5\.10\.0-\d+-cloud-amd64", "ENOENT"),
    Kernel("linux-image-amd64", "", r"6\.1\.0-\d+-amd64", "ENOENT"),
    Kernel("linux-image-cloud-amd64", "trixie", r"6\.12\.\d+\+deb13-cloud-amd64", "EINVAL"),
    Kernel("linux-image-amd64", "trixie", r"6\.12\.\d+\+deb13-amd64", "EINVAL"),
    Kernel("linux-image-cloud-amd64", "sid", r"[7-9]\.\d+\.\d+\+deb14-cloud-amd64", "EINVAL"),
)


@pytest.fixture(scope="module", params=KERNELS, ids=lambda kernel: f"{kernel.meta}-{kernel.suite}")
def kernel(request: pytest.FixtureRequest) -> Kernel:
    found: Kernel = request.param
    return found


@pytest.fixture(scope="module")
def ours(kernel: Kernel) -> Iterator[Mount]:
    """Yield a mount with kprobefs's kprobes, on which tests leave no events."""
    tasks, linux = debian_kernel.with_kernel(kernel.meta, kernel.suite)
    engine = LinuxEngine(tasks, linux, profile_of(linux))
    found = probed_mount(engine, ProcessWatch(), Owner(0, 0), is_tracefs=False)
    yield found
    found.close()


@pytest.fixture(scope="module")
def native(kernel: Kernel) -> Iterator[Mount]:
    found = debian_kernel.mount(meta=kernel.meta, suite=kernel.suite)
    yield found
    found.close()


SETTINGS = "kprobe_events", "set_event", "events/enable", "tracing_on", "current_tracer", "trace_options"
DIRECTORIES = "/scratch", "/tracing/instances", "/tracing/events"


def state(mount: Mount) -> dict[str, object]:
    """Return the settings and the names in directories that a test could change for the next test."""
    shell = Files(mount, SHELL)
    names = {path: sorted(entry.name for entry in mount.readdir(path)) for path in DIRECTORIES}
    return {name: shell.read(f"/tracing/{name}") for name in SETTINGS} | names


@pytest.fixture
def mount(native: Mount) -> Iterator[Mount]:
    """Yield the mount with the kernel's own kprobes, and check that the test leaves the mount as before."""
    before = state(native)
    yield native
    for entry in native.readdir("/scratch"):
        if entry.name not in before["/scratch"]:
            remove = native.rmdir if entry.kind == stat.S_IFDIR else native.unlink
            remove(SHELL, f"/scratch/{entry.name}")
    for name in ("trace", "error_log"):
        Files(native, SHELL).write(f"/tracing/{name}", "\n", os.O_WRONLY | os.O_TRUNC)
    assert state(native) == before


def test_a_walk(kernel: Kernel, mount: Mount) -> None:
    shell, other = Files(mount, SHELL), Files(mount, OTHER)
    assert re.fullmatch(f"Linux version {kernel.release} .*\n", shell.read("/machine/version"))
    assert errno.errorcode[shell.errno("/kprobe_events", "p:x no_such_function")] == kernel.unknown_symbol
    assert "Invalid probed address or symbol" in shell.read("/tracing/error_log")
    shell.write("/kprobe_events", "p:opened do_sys_openat2 flags=+0(%dx):x64\n")
    shell.write("/kprobe_events", "r:returned do_sys_openat2 $retval\n", os.O_WRONLY | os.O_APPEND)
    shell.write("/tracing/events/kprobes/enable", "1")
    assert len(shell.read("/kprobes/list").splitlines()) == 2
    handle = mount.create(OTHER, "/scratch/file", 0o640, os.O_RDWR)
    mount.write(OTHER, handle, b"hello", 0)
    mount.release(handle)
    assert other.read("/scratch/file") == "hello"
    shell.write("/tracing/events/kprobes/enable", "0")
    trace = shell.read("/tracing/trace")
    assert re.search(r"-4002 .* opened: \(do_sys_openat2\+0x[04]/0x\w+\) flags=0x8000\n", trace)
    assert re.search(r"-4002 .* returned: \(.* <- do_sys_openat2\) arg1=(0x)?\w+\n", trace)
    shell.write("/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)
    assert shell.read("/kprobe_events") == ""
    assert shell.read("/kprobes/list") == ""


def test_free_pages_are_the_kernel_s(mount: Mount) -> None:
    """The host finds as many free blocks as /proc/buddyinfo counts, except small blocks, which the read
    itself may take.
    """
    lines = guest_of(mount).syscalls.read_all("/proc/buddyinfo").decode().splitlines()
    counted = [sum(map(int, column)) for column in zip(*(line.split()[4:] for line in lines), strict=True)]
    found = Counter(size for _, size in guest_of(mount).free_pages._blocks())
    assert [found[4096 << order] for order in range(2, len(counted))] == counted[2:]
    assert sum(counted[2:]) > 20


def test_entries_of_functions(ours: Mount, mount: Mount) -> None:
    """kprobefs and the kernel place a probe of a function's entry after the landing pad, and refuse the same
    places.
    """
    assert _placed(ours) == _placed(mount)


def _placed(mount: Mount) -> tuple[list[str], list[str]]:
    """Return the errnos of probes near the entry of vfs_read, and the places of the probes that were
    accepted.
    """
    texts = ("p:a vfs_read", "p:b vfs_read+4", "p:c vfs_read+5", "r:d vfs_read", "p:e vfs_write+1")
    refused = [write(mount, "/kprobe_events", text, os.O_APPEND) for text in texts]
    write(mount, "/tracing/events/kprobes/enable", "1")
    places = sorted(line.split(maxsplit=1)[1] for line in read(mount, "/kprobes/list").splitlines())
    write(mount, "/tracing/events/kprobes/enable", "0")
    write(mount, "/kprobe_events", "\n", os.O_TRUNC)
    return refused, places


def test_directories_of_events(ours: Mount, mount: Mount) -> None:
    """With either engine, the same kernel function creates the directories of a new event, as a probe on it
    shows.

    The function is eventfs_create_dir or, in older kernels, tracefs_create_dir.
    """
    found = _directories(Files(ours, SHELL))
    assert found == ['"grp"', '"one"', '"two"']
    assert _directories(Files(mount, SHELL)) == found


def _directories(shell: Files) -> list[str]:
    definitions = (f"p:k/made {name}_create_dir name=+0($arg1):string" for name in ("eventfs", "tracefs"))
    # A kernel that lacks the function refuses the definition.
    assert any(not write(shell.mount, "/kprobe_events", each, os.O_APPEND) for each in definitions)
    shell.write("/tracing/events/k/enable", "1")
    shell.write("/kprobe_events", "p:grp/one vfs_rmdir\np:grp/two vfs_rmdir\n", os.O_WRONLY | os.O_APPEND)
    shell.write("/tracing/events/k/enable", "0")
    found = re.findall(r" made: .* name=(\S+)\n", shell.read("/tracing/trace"))
    shell.write("/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)
    return found


def test_a_program_that_a_client_executes(mount: Mount) -> None:
    """sched_process_exec has the path of a client's program, although this path exists only on the host."""
    shell, guest = Files(mount, SHELL), guest_of(mount)
    shell.write("/tracing/events/sched/sched_process_exec/enable", "1")
    task = guest.tasks.fork(guest.tasks.init, 4103)
    guest.clients._executions.execute(task, "/usr/bin/program", "program")
    guest.tasks.exit(task)
    shell.write("/tracing/events/sched/sched_process_exec/enable", "0")
    assert " sched_process_exec: filename=/usr/bin/program pid=4103 " in shell.read("/tracing/trace")


def test_news_of_a_histogram_reach_a_client_that_polls() -> None:
    """After a change of a histogram, a poll of its file reports POLLPRI once and POLLIN until the next read.

    Each change also wakes a client that polls.
    """
    mount = debian_kernel.mount(meta=KERNELS[-1].meta, suite=KERNELS[-1].suite)
    shell, other = Files(mount, SHELL), Files(mount, OTHER)
    shell.write("/kprobe_events", "p:opened do_sys_openat2\n")
    shell.write("/tracing/events/kprobes/opened/trigger", "hist:keys=common_pid")
    handle = mount.open(SHELL, "/tracing/events/kprobes/opened/hist", os.O_RDONLY)
    woken: list[int] = []

    def poll() -> int:
        return mount.poll(handle, lambda: woken.append(1)) & (select.POLLIN | select.POLLPRI)

    mount.read(SHELL, handle, 1 << 17, 0)
    assert poll() == 0
    other.read("/machine/version")
    assert woken == [1]
    assert poll() == select.POLLIN | select.POLLPRI
    assert poll() == select.POLLIN
    other.read("/machine/version")
    assert woken == [1, 1]
    mount.read(SHELL, handle, 1 << 17, 0)
    assert poll() == 0
    mount.close()


def test_all_events_can_be_enabled(ours: Mount) -> None:
    """All events can be enabled at once, also events of tracepoints that a function of the kernel must
    register.
    """
    shell = Files(ours, SHELL)
    shell.write("/tracing/set_event", "*:*\n")
    enabled = shell.read("/tracing/set_event").split()
    shell.write("/tracing/events/enable", "0")
    shell.write("/tracing/trace", "\n", os.O_WRONLY | os.O_TRUNC)
    assert set(shell.read("/tracing/available_events").split()) == set(enabled)
    assert "Oops" not in shell.read("/machine/dmesg")


def test_contexts_of_records(ours: Mount, mount: Mount) -> None:
    """Records show the same flags for interrupts and preemption in kprobefs's trace as in the kernel's own
    trace.
    """
    found = [_contexts(Files(tree, SHELL)) for tree in (ours, mount)]
    assert found[0] == found[1]
    assert found[0].keys() == {"entry", "sys_openat", "sys_enter"}


def _contexts(shell: Files) -> dict[str, set[str]]:
    """Return event -> the flags in the records of one system call, limited to the four columns that all
    versions have.
    """
    shell.write("/kprobe_events", "p:k/entry do_sys_openat2\n")
    events = "k/entry", "syscalls/sys_enter_openat", "raw_syscalls/sys_enter"
    for event in events:
        shell.write(f"/tracing/events/{event}/enable", "1")
    shell.mount.release(shell.mount.create(SHELL, "/scratch/context", 0o600, os.O_RDWR))
    for event in events:
        shell.write(f"/tracing/events/{event}/enable", "0")
    found: dict[str, set[str]] = {}
    for line in shell.read("/tracing/trace").splitlines():
        # Newer versions have columns behind the fourth one.
        record = re.match(r" .*\[000\] (.{4})\S* +[\d.]+: (\w+)", line)
        # The results of calls have the same name as their arguments.
        if record and " -> 0x" not in line:
            found.setdefault(record[2], set()).add(record[1])
    shell.write("/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)
    return found


def test_triggers_of_tasks_that_are_not_traced(ours: Mount, mount: Mount) -> None:
    """For a task that set_event_notrace_pid excludes, the same triggers run in kprobefs and in the kernel."""
    found = [_triggers_that_run(Files(tree, SHELL)) for tree in (ours, mount)]
    assert found[0] == found[1]
    assert set(found[0].values()) == {True, False}


def _triggers_that_run(shell: Files) -> dict[str, bool]:
    """Return event and trigger -> whether a write of the task SHELL runs the trigger."""
    shell.write("/kprobe_events", "p:k/wrote vfs_write\n")
    handle = shell.mount.create(SHELL, "/scratch/untraced", 0o600, os.O_RDWR)
    shell.write("/tracing/set_event_notrace_pid", str(SHELL.pid))
    found = {}
    for event in ("k/wrote", "syscalls/sys_enter_write", "raw_syscalls/sys_enter"):
        for trigger, before in (("traceon", "0\n"), ("traceoff if common_pid > 0", "1\n")):
            shell.write(f"/tracing/events/{event}/trigger", trigger)
            shell.write("/tracing/tracing_on", before)
            shell.mount.write(SHELL, handle, b"text", 0)
            shell.write(f"/tracing/events/{event}/trigger", f"!{trigger}")
            found[f"{event} {trigger}"] = shell.read("/tracing/tracing_on") != before
    shell.write("/tracing/set_event_notrace_pid", "\n", os.O_WRONLY | os.O_TRUNC)
    shell.write("/kprobe_events", "\n", os.O_WRONLY | os.O_TRUNC)
    shell.write("/tracing/tracing_on", "1")
    shell.mount.release(handle)
    return found


def test_instances_and_attributes(mount: Mount) -> None:
    shell = Files(mount, SHELL)
    mount.mkdir(SHELL, "/tracing/instances/mine", 0o755)
    assert mount.getattr("/tracing/instances/mine/trace").mode & stat.S_IFREG
    shell.write("/tracing/instances/mine/events/sched/sched_switch/enable", "1")
    shell.write("/tracing/instances/mine/events/sched/sched_switch/enable", "0")
    assert "sched_switch: prev_comm=" in shell.read("/tracing/instances/mine/trace")
    mount.rmdir(SHELL, "/tracing/instances/mine")
    mount.mkdir(SHELL, "/scratch/directory", 0o700)
    found = mount.getattr("/scratch/directory")
    assert (found.mode, found.uid, found.nlink) == (stat.S_IFDIR | 0o700, 0, 2)
    assert "BUG" not in shell.read("/machine/dmesg")
