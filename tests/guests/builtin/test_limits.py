"""machine/limits: limits that are reached, lowered below the current use, and kept by a reboot; refusals
change nothing.
"""

from __future__ import annotations

import errno
import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.limits import Limit, Limits
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from kprobefs.common.errors import CliError, ExitStatus
from kprobefs.daemon.reboot import RebootableKernel
from kprobefs.mount_options import parsed_limits
from tests.guests.builtin.conftest import FIRST_PID, dmesg

pytestmark = pytest.mark.usefixtures("objects_excluded")

CLIENT = Client(FIRST_PID, 0, 0)
LIMITS = "/machine/limits"
EVENTS = "/tracing/dynamic_events"
PAGE = 4096


@pytest.fixture
def mount(kernel: Kernel) -> Mount:
    return kernel.mount()


@contextmanager
def opened(mount: Mount, path: str, flags: int = os.O_RDONLY) -> Iterator[int]:
    handle = mount.open(CLIENT, path, flags)
    try:
        yield handle
    finally:
        mount.release(handle)


def write(mount: Mount, path: str, text: str) -> None:
    with opened(mount, path, os.O_WRONLY) as handle:
        mount.write(CLIENT, handle, text.encode(), 0)


def read(mount: Mount, path: str) -> str:
    with opened(mount, path) as handle:
        return mount.read(CLIENT, handle, 65536, 0).decode()


def shown(mount: Mount) -> dict[str, list[str]]:
    return {name: values for name, *values in map(str.split, read(mount, LIMITS).splitlines())}


@contextmanager
def refused(code: int) -> Iterator[None]:
    with pytest.raises(KernelError) as caught:
        yield
    assert caught.value.errno == code


def test_what_is_shown(mount: Mount) -> None:
    found = shown(mount)
    probes, instances, records = (found.pop(name) for name in ("probes", "instances", "record_bytes"))
    assert found == {
        "open_files": ["65536", "1"],
        "user_open_files": ["16384", "0"],
        "hist_bytes": [str(512 << 20), "0"],
        "user_hist_bytes": [str(128 << 20), "0"],
        "definition_bytes": [str(512 << 20), "0"],
        "user_definition_bytes": [str(128 << 20), "0"],
        "user_record_bytes": [str(128 << 20), "0"],
        "scratch_bytes": ["max", "0"],
        "run_budget_ms": ["200"],
    }
    assert probes[1] == instances[1] == "0"
    assert 30000 < int(probes[0]) < 65536
    assert 0 < int(records[1]) < int(records[0])
    write(mount, LIMITS, "probes 7\n  scratch_bytes 4096 \nrun_budget_ms 50")
    assert [shown(mount)[name][0] for name in ("probes", "scratch_bytes", "run_budget_ms")] == [
        "7",
        "4096",
        "50",
    ]
    write(mount, LIMITS, "probes max\ninstances max\nscratch_bytes max\n")
    assert [shown(mount)[name][0] for name in ("probes", "instances", "scratch_bytes")] == [
        probes[0],
        instances[0],
        "max",
    ]


def test_as_many_instances_as_are_shown_can_be_made(mount: Mount) -> None:
    most = int(shown(mount)["instances"][0])
    assert most < 1024
    for number in range(most):
        assert shown(mount)["instances"] == [str(most), str(number)] or number % 50
        mount.mkdir(CLIENT, f"/tracing/instances/i{number}", 0o755)
    with refused(errno.ENOMEM):
        mount.mkdir(CLIENT, "/tracing/instances/more", 0o755)
    assert shown(mount)["instances"] == [str(most), str(most)]


def test_as_many_probes_as_are_shown_can_be_defined(kernel: Kernel, mount: Mount) -> None:
    events = kernel.tracing.system.events
    most = int(shown(mount)["probes"][0])
    assert most == events.free_ids
    # Take most ids, because thousands of definitions would take long.
    events._next_id += most - 2
    assert shown(mount)["probes"] == ["2", "0"]
    write(mount, EVENTS, "p:one vfs_read\np:two vfs_read\n")
    with refused(errno.ENODEV):
        write(mount, EVENTS, "p:three vfs_read\n")
    assert shown(mount)["probes"] == ["2", "2"]
    write(mount, EVENTS, "-:one\n")
    assert shown(mount)["probes"] == ["2", "1"]
    write(mount, EVENTS, "p:three vfs_read\n")


def test_the_open_files_of_one_user(mount: Mount) -> None:
    user = Client(FIRST_PID, 5, 60)
    other = Client(FIRST_PID, 6, 60)
    write(mount, LIMITS, "user_open_files 3\n")
    handles = [mount.open(user, "/tracing/README", os.O_RDONLY) for _ in range(3)]
    with refused(errno.ENFILE):
        mount.open(user, "/tracing/README", os.O_RDONLY)
    with refused(errno.ENFILE):
        mount.opendir(user, "/")
    handles.append(mount.open(other, "/tracing/README", os.O_RDONLY))
    handles += [mount.open(CLIENT, "/tracing/README", os.O_RDONLY) for _ in range(5)]
    assert shown(mount)["user_open_files"] == ["3", "3"]
    mount.release(handles.pop(0))
    handles.append(mount.open(user, "/tracing/README", os.O_RDONLY))
    for handle in handles:
        mount.release(handle)
    assert shown(mount)["user_open_files"] == ["3", "0"]


def test_the_memory_of_histograms(mount: Mount) -> None:
    trigger = "/tracing/events/kprobes/e/trigger"

    def used() -> int:
        return int(shown(mount)["hist_bytes"][1])

    write(mount, EVENTS, "p:e int_sqrt a=$arg1\n")
    write(mount, trigger, "hist:keys=a\n")
    empty = used()
    write(mount, "/machine/call", "".join(f"int_sqrt {number}\n" for number in range(100)))
    element = (used() - empty) // 100
    assert used() == empty + 100 * element
    write(mount, LIMITS, f"hist_bytes {used() + 10 * element}\n")
    write(mount, "/machine/call", "".join(f"int_sqrt {number}\n" for number in range(90, 120)))
    text = read(mount, "/tracing/events/kprobes/e/hist")
    assert "    Hits: 120\n    Entries: 110\n    Dropped: 10\n" in text
    with refused(errno.ENOMEM):
        write(mount, trigger, "hist:keys=a:sort=a\n")
    assert read(mount, trigger).count("\n") == 1
    write(mount, trigger, "hist:keys=a:clear\n")
    assert used() == empty
    write(mount, trigger, "hist:name=x:keys=a\n")
    write(mount, EVENTS, "p:f int_sqrt a=$arg1\n")
    named = used()
    write(mount, "/tracing/events/kprobes/f/trigger", "hist:name=x:keys=a\n")
    assert used() == named == 2 * empty
    write(mount, trigger, "!hist:name=x:keys=a\n")
    assert used() == named
    write(mount, "/tracing/events/kprobes/f/trigger", "!hist:name=x:keys=a\n")
    write(mount, trigger, "!hist:keys=a\n")
    assert used() == 0


def test_the_memory_of_records_is_shown_and_fixed(mount: Mount) -> None:
    write(mount, "/tracing/buffer_size_kb", "2000\n")
    before = int(shown(mount)["record_bytes"][1])
    write(mount, "/tracing/snapshot", "1\n")
    assert int(shown(mount)["record_bytes"][1]) > before + (1 << 20)
    with refused(errno.EINVAL):
        write(mount, LIMITS, "record_bytes 1000000\n")


USERS = [Client(FIRST_PID, uid, 60) for uid in (5, 6)]


def write_as(client: Client, mount: Mount, path: str, text: str) -> None:
    handle = mount.open(client, path, os.O_WRONLY)
    try:
        mount.write(client, handle, text.encode(), 0)
    finally:
        mount.release(handle)


def test_the_memory_of_one_user_s_histograms(mount: Mount) -> None:
    """A user whose histograms have reached user_hist_bytes gets no further elements and histograms.

    Other users are not affected.
    """
    one, other = USERS
    names = "abcd"
    for name in names:
        write(mount, EVENTS, f"p:{name} int_sqrt a=$arg1\n")
    triggers = [f"/tracing/events/kprobes/{name}/trigger" for name in names]
    write_as(one, mount, triggers[0], "hist:keys=a\n")
    empty = int(shown(mount)["user_hist_bytes"][1])
    write(mount, LIMITS, f"user_hist_bytes {2 * empty - 1}\n")
    with refused(errno.ENOMEM):
        write_as(one, mount, triggers[1], "hist:keys=a\n")
    for client, trigger in ((other, triggers[2]), (CLIENT, triggers[3])):
        write_as(client, mount, trigger, "hist:keys=a\n")
    write(mount, "/machine/call", "".join(f"int_sqrt {number}\n" for number in range(100)))
    entries = [
        read(mount, f"/tracing/events/kprobes/{name}/hist").partition("Entries: ")[2] for name in "acd"
    ]
    counts = [int(text.split()[0]) for text in entries]
    assert 0 < counts[0] == counts[1] < counts[2] == 100
    assert 2 * empty - 1 - empty // 2 < int(shown(mount)["user_hist_bytes"][1]) < 2 * empty
    for trigger in (triggers[0], triggers[2], triggers[3]):
        write(mount, trigger, "!hist:keys=a\n")
    assert (shown(mount)["user_hist_bytes"][1], shown(mount)["hist_bytes"][1]) == ("0", "0")


def test_the_memory_of_filters_and_synthetic_events(mount: Mount) -> None:
    """definition_bytes of a user includes filters, error texts in filter files, and fields of synthetic
    events.
    """
    one, other = USERS
    write(mount, EVENTS, "p:a int_sqrt a=$arg1\np:b int_sqrt a=$arg1\n")
    event, second = (f"/tracing/events/kprobes/{name}" for name in "ab")
    terms = " || ".join(["a == 1"] * 50)
    write_as(one, mount, f"{event}/filter", f"{terms}\n")
    each = int(shown(mount)["user_definition_bytes"][1])
    assert each >= 50 * len(terms)
    write(mount, LIMITS, f"user_definition_bytes {each * 3 // 2}\n")
    probe = f"e:e sched/sched_switch if {terms.replace('a ', 'prev_pid ')}\n"
    synthetic = f"s {';'.join(f'u64 f{number}' for number in range(60))}\n"
    with refused(errno.ENOMEM):
        write_as(one, mount, f"{second}/filter", f"{terms}\n")
    with refused(errno.ENOMEM):
        write_as(one, mount, f"{second}/filter", f"{terms} || nonsense\n")
    with refused(errno.ENOMEM):
        write_as(one, mount, f"{second}/trigger", f"stacktrace if {terms}\n")
    with refused(errno.ENOMEM):
        write_as(one, mount, "/tracing/synthetic_events", synthetic)
    with refused(errno.ENOMEM):
        write_as(one, mount, "/tracing/dynamic_events", probe)
    assert read(mount, f"{second}/filter") == "none\n"
    assert read(mount, f"{second}/trigger").startswith("#")
    assert read(mount, "/tracing/synthetic_events") == ""
    for client in (other, CLIENT):
        write_as(client, mount, f"{second}/filter", f"{terms}\n")
    write_as(one, mount, f"{event}/filter", "0\n")
    write_as(one, mount, f"{event}/trigger", f"stacktrace if {terms}\n")
    write_as(CLIENT, mount, "/tracing/synthetic_events", synthetic)
    write(mount, "/tracing/dynamic_events", probe)
    mount.mkdir(CLIENT, "/tracing/instances/i", 0o755)
    write(mount, "/tracing/instances/i/events/kprobes/b/filter", f"{terms}\n")
    assert int(shown(mount)["definition_bytes"][1]) > 4 * each
    write(mount, "/tracing/dynamic_events", "-:e\n-:synthetic/s\n-:b\n")
    write(mount, f"{event}/trigger", "!stacktrace\n")
    mount.rmdir(CLIENT, "/tracing/instances/i")
    gc.collect()
    assert [shown(mount)[name][1] for name in ("definition_bytes", "user_definition_bytes")] == ["0", "0"]


def test_the_record_memory_of_one_user(mount: Mount) -> None:
    """user_record_bytes limits the memory for records of one user's instances, with buffers and snapshots."""
    one, other = USERS
    mount.mkdir(one, "/tracing/instances/one", 0o755)
    each = int(shown(mount)["user_record_bytes"][1])
    write(mount, LIMITS, f"user_record_bytes {each * 3 // 2}\n")
    with refused(errno.ENOMEM):
        mount.mkdir(one, "/tracing/instances/two", 0o755)
    for client in (other, CLIENT):
        mount.mkdir(client, f"/tracing/instances/of{client.uid}", 0o755)
    with refused(errno.ENOMEM):
        write_as(one, mount, "/tracing/instances/one/snapshot", "1\n")
    with refused(errno.ENOMEM):
        write_as(one, mount, "/tracing/instances/one/buffer_size_kb", f"{each // 500}\n")
    write_as(one, mount, "/tracing/instances/one/buffer_size_kb", "100\n")
    write_as(one, mount, "/tracing/instances/one/snapshot", "1\n")
    assert shown(mount)["user_record_bytes"][1] == str(each)
    mount.rmdir(CLIENT, "/tracing/instances/of6")
    assert int(shown(mount)["user_record_bytes"][1]) < each
    mount.rmdir(CLIENT, "/tracing/instances/one")
    assert shown(mount)["user_record_bytes"][1] == "0"


def marks(mount: Mount, numbers: range) -> None:
    for number in numbers:
        write(mount, "/tracing/trace_marker", f"mark {number} {'x' * 900}\n")


def marked(mount: Mount) -> list[int]:
    with opened(mount, "/tracing/trace") as handle:
        text = b""
        while data := mount.read(CLIENT, handle, 65536, len(text)):
            text += data
    return [int(line.split("mark ")[1].split()[0]) for line in text.decode().splitlines() if "mark " in line]


def test_a_buffer_grows_beyond_half_of_the_memory(mount: Mount) -> None:
    """A buffer can grow beyond half of the memory for records, because its old memory does not count.

    The records stay.
    """
    half = int(shown(mount)["record_bytes"][0]) >> 11
    write(mount, "/tracing/buffer_size_kb", f"{half - 2000}\n")
    marks(mount, range(20))
    for size in (half + 2000, 2 * half - 20000, half + 7000):
        write(mount, "/tracing/buffer_size_kb", f"{size}\n")
        assert size <= int(read(mount, "/tracing/buffer_size_kb")) < size + 4
        assert marked(mount) == [*range(20)]
    before = shown(mount)["record_bytes"]
    with refused(errno.ENOMEM):
        write(mount, "/tracing/buffer_size_kb", f"{2 * half + 1}\n")
    assert (marked(mount), shown(mount)["record_bytes"]) == ([*range(20)], before)
    marks(mount, range(20, 30))
    assert marked(mount) == [*range(30)]


def test_a_snapshot_of_another_size_where_memory_is_short(mount: Mount) -> None:
    most = int(shown(mount)["record_bytes"][0]) // 1024
    for size in (most * 45 // 100, most * 43 // 100):
        write(mount, "/tracing/buffer_size_kb", f"{size}\n")
        write(mount, "/tracing/snapshot", "1\n")
    marks(mount, range(3))
    write(mount, "/tracing/snapshot", "1\n")
    write(mount, "/tracing/snapshot", "1\n")
    assert marked(mount) == [0, 1, 2]


@pytest.mark.parametrize("instances", [0, 220])
def test_a_reboot_where_most_memory_is_in_use(instances: int) -> None:
    """A reboot succeeds and keeps the records even if more than half of the memory for records is in use."""
    living = RebootableKernel(MachineConfig(), RootLayout.FULL, Owner())
    mount = living.mount
    for number in range(instances):
        mount.mkdir(CLIENT, f"/tracing/instances/i{number}", 0o755)
    if not instances:
        most = int(shown(mount)["record_bytes"][0])
        write(mount, "/tracing/buffer_size_kb", f"{most // 1024 * 2 // 5}\n")
        write(mount, "/tracing/snapshot", "1\n")
    marks(mount, range(5))
    before = shown(mount)
    assert int(before["record_bytes"][1]) > int(before["record_bytes"][0]) // 2
    living.reboot()
    assert marked(mount) == [*range(5)]
    assert shown(mount)["record_bytes"] == before["record_bytes"]
    mount.close()


@pytest.mark.parametrize(
    ("line", "code"),
    [
        ("probes", errno.EINVAL),
        ("probes 1 2", errno.EINVAL),
        ("probes -1", errno.EINVAL),
        ("probes 0x10", errno.EINVAL),
        ("nosuch 1", errno.EINVAL),
        ("run_budget_ms max", errno.EINVAL),
        ("run_budget_ms 9", errno.ERANGE),
        ("run_budget_ms 600001", errno.ERANGE),
        (f"scratch_bytes {1 << 63}", errno.ERANGE),
    ],
)
def test_wrong_values_change_nothing_and_are_told(kernel: Kernel, mount: Mount, line: str, code: int) -> None:
    before = read(mount, LIMITS)
    for text in (f"{line}\n", f"probes 1\n{line}\ninstances 1\n"):
        with refused(code):
            write(mount, LIMITS, text)
        assert read(mount, LIMITS) == before
    assert "limits: " in dmesg(kernel)


@pytest.mark.parametrize(
    "definition", ["p:more vfs_read", "p:two vfs_write", "s:made int a", "p:later mod:f"]
)
def test_probes(kernel: Kernel, mount: Mount, definition: str) -> None:
    """The limit of probes counts second probes of an event, synthetic events, and probes of modules that are
    not loaded.
    """
    write(mount, EVENTS, "p:one vfs_read\n")
    write(mount, EVENTS, "p:two vfs_read\n")
    write(mount, LIMITS, "probes 2")
    before, patched = read(mount, EVENTS), dict(kernel.machine.text.ledger)
    with refused(errno.ENOSPC):
        write(mount, EVENTS, f"{definition}\n")
    assert (read(mount, EVENTS), dict(kernel.machine.text.ledger)) == (before, patched)
    assert read(mount, "/tracing/error_log") == ""
    assert "limits: the limit of probes is reached: 2" in dmesg(kernel)
    with refused(errno.EINVAL):
        write(mount, EVENTS, "p:one vfs_read %nosuch\n")
    write(mount, EVENTS, "-:one\n")
    write(mount, EVENTS, f"{definition}\n")
    assert shown(mount)["probes"] == ["2", "2"]


def test_instances(mount: Mount) -> None:
    mount.mkdir(CLIENT, "/tracing/instances/one", 0o755)
    write(mount, LIMITS, "instances 1")
    with refused(errno.EEXIST):
        mount.mkdir(CLIENT, "/tracing/instances/one", 0o755)
    with refused(errno.ENOSPC):
        mount.mkdir(CLIENT, "/tracing/instances/two", 0o755)
    mount.rmdir(CLIENT, "/tracing/instances/one")
    mount.mkdir(CLIENT, "/tracing/instances/two", 0o755)


def test_open_files(mount: Mount) -> None:
    """At the limit of open files, a client can still write machine/limits to raise the limit."""
    with opened(mount, "/scratch/f", os.O_CREAT | os.O_WRONLY), opened(mount, "/tracing/trace_pipe"):
        handle = mount.opendir(CLIENT, "/tracing")
        write(mount, LIMITS, "open_files 3")
        for path in ("/scratch/f", "/tracing/trace"):
            with refused(errno.ENFILE):
                mount.open(CLIENT, path, os.O_RDONLY)
        with refused(errno.ENFILE):
            mount.create(CLIENT, "/scratch/new", 0o644, os.O_WRONLY)
        with refused(errno.ENFILE):
            mount.opendir(CLIENT, "/")
        assert shown(mount)["open_files"] == ["3", "4"]
        mount.release(handle)
        with opened(mount, "/tracing/trace"), refused(errno.ENFILE):
            mount.open(CLIENT, "/tracing/trace", os.O_RDONLY)
        write(mount, LIMITS, "open_files 4")
        with opened(mount, "/tracing/trace"):
            pass
    assert shown(mount)["open_files"] == ["4", "1"]


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_scratch_bytes(arch: str) -> None:
    """scratch_bytes counts whole pages. As on a full disk, a write over the limit stores the bytes
    that fit.
    """
    with Kernel(MachineConfig(arch=arch)) as kernel:
        mount = kernel.mount()
        write(mount, LIMITS, f"scratch_bytes {10 * PAGE + 1}")
        handle = mount.create(CLIENT, "/scratch/f", 0o644, os.O_RDWR)
        assert mount.write(CLIENT, handle, bytes(9 * PAGE), 0) == 9 * PAGE
        assert mount.write(CLIENT, handle, b"x" * 3 * PAGE, 9 * PAGE) == PAGE
        with refused(errno.ENOSPC):
            mount.write(CLIENT, handle, b"x", 10 * PAGE)
        assert mount.write(CLIENT, handle, b"old pages", 5 * PAGE) == 9
        assert shown(mount)["scratch_bytes"][1] == str(10 * PAGE)
        mount.ftruncate(CLIENT, handle, PAGE)
        assert mount.write(CLIENT, handle, bytes(PAGE), PAGE) == PAGE
        write(mount, LIMITS, "scratch_bytes 0")
        assert mount.read(CLIENT, handle, 9, 0) == bytes(9)
        with refused(errno.ENOSPC):
            mount.write(CLIENT, handle, b"x", 2 * PAGE)
        write(mount, LIMITS, "scratch_bytes max")
        assert mount.write(CLIENT, handle, bytes(64 * PAGE), 2 * PAGE) == 64 * PAGE


def test_run_budget() -> None:
    """A lower run_budget_ms takes effect at once: a kernel function that loops is stopped as a soft
    lockup.
    """
    with Kernel(MachineConfig(run_budget=600)) as kernel:
        mount = kernel.mount()
        assert shown(mount)["run_budget_ms"] == ["600000"]
        write(mount, LIMITS, "run_budget_ms 200")
        with refused(errno.EFAULT):
            write(mount, "/machine/call", '_raw_spin_lock "held"')
        assert not kernel.guest.is_dead
        assert "BUG: soft lockup" in dmesg(kernel)


def test_lowered_below_what_is_in_use(mount: Mount) -> None:
    """If a limit is lowered below the current use, the existing probes stay and work, and only new probes are
    refused.
    """
    write(mount, EVENTS, "p:one vfs_read\n")
    write(mount, EVENTS, "p:two vfs_write\n")
    write(mount, LIMITS, "probes 0")
    assert shown(mount)["probes"] == ["0", "2"]
    write(mount, "/tracing/events/kprobes/enable", "1")
    write(mount, "/tracing/events/kprobes/enable", "0")
    write(mount, EVENTS, "-:one\n")
    with refused(errno.ENOSPC):
        write(mount, EVENTS, "p:three vfs_read\n")


def test_a_reboot_keeps_them() -> None:
    config = MachineConfig(limits=Limits({Limit.PROBES: 1}), run_budget=0.3)
    living = RebootableKernel(config, RootLayout.FULL, Owner())
    write(living.mount, EVENTS, "p:one vfs_read\n")
    write(living.mount, LIMITS, "run_budget_ms 40\nscratch_bytes 8192")
    living.reboot()
    found = shown(living.mount)
    assert [found[name][0] for name in ("probes", "run_budget_ms", "scratch_bytes")] == ["1", "40", "8192"]
    assert read(living.mount, EVENTS) == "p:kprobes/one vfs_read\n"
    handle = living.mount.create(CLIENT, "/scratch/f", 0o644, os.O_WRONLY)
    assert living.mount.write(CLIENT, handle, bytes(4 * PAGE), 0) == 2 * PAGE
    living.mount.close()


def test_options_of_a_mount() -> None:
    limits, budget = parsed_limits(["probes=5", "instances=max", "run_budget_ms=250"])
    assert (limits[Limit.PROBES], budget) == (5, 0.25)
    for wrong in ("probes", "probes=", "nosuch=1", "run_budget_ms=1"):
        with pytest.raises(CliError) as caught:
            parsed_limits([wrong])
        assert caught.value.status == ExitStatus.USAGE
