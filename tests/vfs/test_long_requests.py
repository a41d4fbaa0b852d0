"""During a long request, the control lock is released between two lines, two records or two pieces."""

from __future__ import annotations

import errno
import gc
import json
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.guest_info import ModuleInfo
from emulated_kernel.trace.hist import tracing_map
from emulated_kernel.trace.output.line_formatter import LineFormatter, TimedRecord
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.vfs.core import seq_file
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Directory
from emulated_kernel.vfs.mount import Mount
from emulated_kernel.vfs.trees.stats import probes_file
from tests.vfs.files import ROOT, assert_errno

OTHER = Client(pid=4322, uid=0, gid=0)
LINES = {
    "/machine/call": "int_sqrt 9\n",
    "/machine/clock": "virtual seed 7\n",
    "/machine/limits": "probes 100\n",
    "/machine/load": "stop\n",
    "/machine/modules": "load counter\nunload counter\n",
}
"""Path of a file -> lines that can be repeated."""


@pytest.fixture
def mount() -> Iterator[Mount]:
    with Kernel() as kernel:
        mount = kernel.mount()
        yield mount
        mount.close()


def write(mount: Mount, path: str, text: str, client: Client = ROOT) -> int:
    handle = mount.open(client, path, os.O_WRONLY | os.O_APPEND)
    try:
        return mount.write(client, handle, text.encode(), 0)
    finally:
        mount.release(handle)


def read(mount: Mount, path: str, client: Client = ROOT, size: int = 1 << 17) -> str:
    handle = mount.open(client, path, os.O_RDONLY)
    try:
        data = b""
        while part := mount.read(client, handle, size, len(data)):
            data += part
        return data.decode()
    finally:
        mount.release(handle)


@contextmanager
def others(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Within the block, let another client read kprobes/list whenever a long request releases the lock.

    Yield the list of texts that this client has read.
    """
    answers: list[str] = []

    def answer(_lock: ControlLock) -> None:
        if len(answers) < 1000:
            answers.append(read(mount, "/kprobes/list", OTHER))

    with monkeypatch.context() as patch:
        patch.setattr(ControlLock, "yield_lock", answer)
        yield answers


@pytest.mark.parametrize("is_probed", [False, True], ids=["unprobed", "probed"])
@pytest.mark.parametrize("path", LINES)
def test_a_write_leaves_the_lock_between_two_lines(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, path: str, is_probed: bool
) -> None:
    if is_probed:
        write(mount, "/kprobe_events", "p:probe vfs_write\n")
        write(mount, "/tracing/events/kprobes/probe/enable", "1\n")
    text = LINES[path] * 10
    with others(mount, monkeypatch) as answers:
        assert write(mount, path, text) == len(text)
    assert len(answers) == text.count("\n") - 1
    assert all("vfs_write" in answer for answer in answers) or not is_probed


def test_the_first_step_of_many_modules_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the lock is first released, a write of 100 lines reads the guest's list of modules no more often
    than one of 2 lines.
    """
    with Kernel() as kernel:
        mount = kernel.mount()
        walks: list[int] = []
        before_others: list[int] = []
        modules = kernel.guest.kernel.modules

        def counted() -> list[ModuleInfo]:
            walks.append(1)
            return modules()

        monkeypatch.setattr(kernel.guest.kernel, "modules", counted)
        monkeypatch.setattr(ControlLock, "yield_lock", lambda _lock: before_others.append(len(walks)))
        for pairs in (1, 50):
            walks.clear()
            write(mount, "/machine/modules", "load counter\nunload counter\n" * pairs)
        assert len(before_others) == 1 + 99
        assert 0 < before_others[1] <= before_others[0]
        mount.close()


def test_results_of_all_lines_are_kept(mount: Mount) -> None:
    write(mount, "/machine/call", "int_sqrt 9\nint_sqrt 16\n")
    assert read(mount, "/machine/call") == "int_sqrt = 0x3 (3)\nint_sqrt = 0x4 (4)\n"
    with assert_errno(errno.ENOENT):
        write(mount, "/machine/call", "int_sqrt 25\nno_such_function\nint_sqrt 36\n")
    first, second = read(mount, "/machine/call").splitlines()
    assert first == "int_sqrt = 0x5 (5)"
    assert second.startswith("no_such_function: ")


def test_lines_are_parsed_before_the_first_one_takes_effect(mount: Mount) -> None:
    before = read(mount, "/machine/clock").split("time")[0]
    with assert_errno(errno.EINVAL):
        write(mount, "/machine/clock", "virtual seed 99\nnonsense\n")
    assert read(mount, "/machine/clock").split("time")[0] == before


@pytest.mark.parametrize("is_probed", [False, True], ids=["unprobed", "probed"])
def test_the_write_of_a_killed_process_stops(mount: Mount, is_probed: bool) -> None:
    if is_probed:
        write(mount, "/kprobe_events", "p:probe vfs_write\n")
        write(mount, "/tracing/events/kprobes/probe/enable", "1\n")
    asked = iter([False, False, True])
    mount.lock.is_dying = lambda _thread: next(asked)
    with assert_errno(errno.EINTR):
        write(mount, "/machine/call", "int_sqrt 9\n" * 1000)
    assert read(mount, "/machine/call", OTHER).count("int_sqrt") == 3
    mount.lock.is_dying = lambda _thread: False
    assert write(mount, "/machine/call", "int_sqrt 9\n" * 3) == 33


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/tracing/events/enable", "1\n"),
        ("/tracing/events/kprobes/enable", "1\n"),
        ("/tracing/set_event", "kprobes:*\n"),
    ],
)
def test_many_events_are_enabled_in_steps(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, path: str, text: str
) -> None:
    write(mount, "/kprobe_events", "".join(f"p:e{number} int_sqrt\n" for number in range(300)))
    removed: list[int] = []

    def remove_one(_lock: ControlLock) -> None:
        if not removed:
            write(mount, "/kprobe_events", "-:e5\n", OTHER)
        removed.append(1)

    with monkeypatch.context() as patch:
        patch.setattr(ControlLock, "yield_lock", remove_one)
        assert write(mount, path, text) == len(text)
    assert len(removed) >= 300 // 64
    assert read(mount, "/tracing/events/kprobes/enable") == "1\n"
    assert read(mount, "/tracing/set_event").count("kprobes:") == 299


def opened(mount: Mount, path: str, flags: int = os.O_RDONLY) -> int:
    return mount.open(ROOT, path, flags)


def mark(mount: Mount, *numbers: int) -> None:
    for number in numbers:
        write(mount, "/tracing/trace_marker", f"mark {number}\n")


def marks(text: str) -> list[int]:
    return [int(line.rpartition(" ")[2]) for line in text.splitlines() if ": mark " in line]


def rest(mount: Mount, handle: int, position: int) -> str:
    data = b""
    while part := mount.read(ROOT, handle, 1 << 17, position + len(data)):
        data += part
    return data.decode()


def test_a_trace_is_rendered_as_it_is_read(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    write(mount, "/tracing/buffer_size_kb", "1024\n")
    mark(mount, *range(3000))
    rendered = 0
    line = LineFormatter.line

    def counted(self: LineFormatter, entry: TimedRecord, next_time: int, index: int) -> str:
        nonlocal rendered
        rendered += 1
        return line(self, entry, next_time, index)

    monkeypatch.setattr(LineFormatter, "line", counted)
    handle = opened(mount, "/tracing/trace")
    first = mount.read(ROOT, handle, 4096, 0)
    assert len(first) == 4096
    assert rendered < 100
    assert marks(first.decode() + rest(mount, handle, 4096)) == [*range(3000)]
    assert rendered == 3000


def test_a_trace_ends_with_the_last_record_of_its_first_read(mount: Mount) -> None:
    mark(mount, *range(100))
    handle = opened(mount, "/tracing/trace")
    first = mount.read(ROOT, handle, 1024, 0).decode()
    mark(mount, *range(100, 200))
    assert marks(first + rest(mount, handle, 1024)) == [*range(100)]
    assert marks(rest(mount, handle, 0)) == [*range(200)]


@pytest.mark.parametrize("lost_by", ["overwriting", "consuming"])
def test_records_that_are_lost_meanwhile_become_a_note(mount: Mount, lost_by: str) -> None:
    write(mount, "/tracing/buffer_size_kb", "64\n")
    mark(mount, *range(500))
    handle = opened(mount, "/tracing/trace")
    first = mount.read(ROOT, handle, 1024, 0).decode()
    if lost_by == "overwriting":
        mark(mount, *range(500, 2400))
    else:
        pipe = opened(mount, "/tracing/trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
        consumed = ""
        while "mark 400" not in consumed:
            consumed += mount.read(ROOT, pipe, 4096, 0).decode()
    text = first + rest(mount, handle, 1024)
    assert text.count("CPU:0 [LOST EVENTS]\n") == 1
    before, after = (marks(part) for part in text.split("CPU:0 [LOST EVENTS]\n"))
    assert before == [*range(len(before))]
    assert after == [*range(after[0], 500)]
    assert after[0] > len(before)


def test_a_trace_whose_records_are_all_overwritten_ends(mount: Mount) -> None:
    write(mount, "/tracing/buffer_size_kb", "16\n")
    mark(mount, *range(100))
    handle = opened(mount, "/tracing/trace")
    first = mount.read(ROOT, handle, 1024, 0).decode()
    mark(mount, *range(100, 2000))
    assert marks(first + rest(mount, handle, 1024))[-1] < 100


@pytest.mark.parametrize(
    "clear",
    [
        ("/tracing/trace_clock", "global\n"),
        ("/tracing/current_tracer", "function\n"),
        ("/tracing/kprobe_events", "-:probe\n"),
    ],
)
def test_a_trace_ends_if_its_buffer_is_emptied(mount: Mount, clear: tuple[str, str]) -> None:
    write(mount, "/tracing/kprobe_events", "p:probe int_sqrt\n")
    write(mount, "/tracing/events/kprobes/probe/enable", "1\n")
    write(mount, "/machine/call", "int_sqrt 9\n" * 200)
    write(mount, "/tracing/events/kprobes/probe/enable", "0\n")
    handle = opened(mount, "/tracing/trace")
    mount.read(ROOT, handle, 1024, 0)
    write(mount, *clear)
    # A line that was rendered in part is completed.
    assert rest(mount, handle, 1024).count("\n") <= 1


def test_an_open_trace_keeps_its_size(mount: Mount) -> None:
    handle = opened(mount, "/tracing/per_cpu/cpu0/trace")
    for path in ("/tracing/buffer_size_kb", "/tracing/per_cpu/cpu0/buffer_size_kb"):
        with assert_errno(errno.ENOMEM):
            write(mount, path, "2000\n")
    # Linux: a size that is in force can be written, but only for one CPU.
    size = read(mount, "/tracing/per_cpu/cpu0/buffer_size_kb")
    write(mount, "/tracing/per_cpu/cpu0/buffer_size_kb", size)
    mount.release(handle)
    write(mount, "/tracing/buffer_size_kb", "2000\n")
    handle = opened(mount, "/tracing/trace", os.O_WRONLY)
    write(mount, "/tracing/buffer_size_kb", "1000\n")
    assert read(mount, "/tracing/buffer_size_kb") == "1000\n"


def test_an_open_snapshot_keeps_its_size(mount: Mount) -> None:
    mark(mount, *range(100))
    write(mount, "/tracing/snapshot", "1\n")
    handle = opened(mount, "/tracing/snapshot")
    first = mount.read(ROOT, handle, 1024, 0).decode()
    write(mount, "/tracing/buffer_size_kb", "2000\n")
    with assert_errno(errno.EBUSY):
        write(mount, "/tracing/snapshot", "1\n")
    assert marks(first + rest(mount, handle, 1024)) == [*range(100)]
    write(mount, "/tracing/snapshot", "0\n")
    assert "is freed" in rest(mount, handle, 0)
    mount.release(handle)
    write(mount, "/tracing/snapshot", "1\n")
    assert "is allocated" in read(mount, "/tracing/snapshot")


@pytest.mark.parametrize("is_probed", [False, True], ids=["unprobed", "probed"])
def test_a_read_leaves_the_lock_between_records(
    mount: Mount, monkeypatch: pytest.MonkeyPatch, is_probed: bool
) -> None:
    if is_probed:
        write(mount, "/kprobe_events", "p:probe vfs_read\n")
        write(mount, "/tracing/events/kprobes/probe/enable", "1\n")
    whole = read(mount, "/machine/kallsyms")
    handle = opened(mount, "/machine/kallsyms")
    with monkeypatch.context() as patch:
        patch.setattr(seq_file, "RECORDS_PER_STEP", 100)
        with others(mount, monkeypatch) as answers:
            # The read of an offset renders everything before it.
            tail = mount.read(ROOT, handle, 4096, len(whole) - 4096).decode()
    assert tail == whole[-4096:]
    assert len(answers) == whole.count("\n") // 100


def test_histograms_are_sorted_in_steps(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    write(mount, "/kprobe_events", "p:probe int_sqrt a=$arg1\n")
    for name in ("x", "y"):
        write(mount, "/tracing/events/kprobes/probe/trigger", f"hist:name={name}:keys=a\n")
    for start in range(0, 300, 100):
        lines = "".join(f"int_sqrt {number}\n" for number in range(start, start + 100))
        write(mount, "/machine/call", lines)
    whole = read(mount, "/tracing/events/kprobes/probe/hist")
    assert whole.count("hitcount:          1\n") == 600
    monkeypatch.setattr(tracing_map, "SORT_STEP", 10)
    with others(mount, monkeypatch) as answers:
        assert read(mount, "/tracing/events/kprobes/probe/hist") == whole
    assert len(answers) >= 2 * 300 // 10


def test_a_histogram_may_change_while_it_is_read(mount: Mount) -> None:
    write(mount, "/kprobe_events", "p:probe int_sqrt a=$arg1\n")
    write(mount, "/tracing/events/kprobes/probe/trigger", "hist:keys=a\n")
    write(mount, "/machine/call", "".join(f"int_sqrt {number}\n" for number in range(200)))
    handle = opened(mount, "/tracing/events/kprobes/probe/hist")
    first = mount.read(ROOT, handle, 512, 0).decode()
    write(mount, "/tracing/events/kprobes/probe/trigger", "!hist:keys=a\n")
    assert (first + rest(mount, handle, 512)).count("hitcount: ") == 200


def test_a_descriptor_of_kallsyms_holds_only_what_it_reads(mount: Mount) -> None:
    for is_fresh in (True, False):
        handles = [opened(mount, "/machine/kallsyms") for _ in range(50)]
        gc.collect()
        tracemalloc.start()
        assert all(mount.read(ROOT, handle, 1, 0) for handle in handles)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        for handle in handles:
            mount.release(handle)
        assert is_fresh or held < 50 * 2000


def test_machine_probes_renders_each_event_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = 0
    mode = Kprobes.mode

    def counted(self: Kprobes, kprobe: Kprobe) -> str:
        nonlocal rendered
        rendered += 1
        return mode(self, kprobe)

    with Kernel() as kernel:
        file = probes_file(kernel.components)
        Directory(0o755, {"probes": file})
        kernel.write_file("kprobe_events", "".join(f"p:e{number} int_sqrt\n" for number in range(300)))
        monkeypatch.setattr(Kprobes, "mode", counted)
        probes = file.opened_as(file, os.O_RDONLY, ROOT)
        text = b""
        while part := probes.read(1000, len(text)):
            text += part
    assert [json.loads(line)["event"] for line in text.splitlines()] == [
        f"kprobes/e{number}" for number in range(300)
    ]
    assert rendered == 300
