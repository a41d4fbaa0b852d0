"""--state DIR: the state that a daemon saves, and how the next daemon restores this state."""

from __future__ import annotations

import errno
import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import product
from pathlib import Path
from threading import Event

import pytest

from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.ring.ring_layout import CONTROL_SIZE, RingControl
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.limits import Limit, Limits
from kprobefs.daemon.state import saved_state
from kprobefs.daemon.state.journal import Journal
from kprobefs.daemon.state.journal import read as read_journal
from kprobefs.daemon.state.previous_boot import array_places
from kprobefs.measure.bench import FUNCTION
from kprobefs.measure.contention import instructions_a_call
from tests.state.life import CLIENT, CONFIG, DEFINITIONS, Run, head_of, records_of

pytestmark = pytest.mark.usefixtures("objects_excluded")


@pytest.mark.parametrize("arch", ["x86_64", "riscv64"])
def test_what_was_there_is_there_again(place: Path, arch: str) -> None:
    run = Run(place, replace(CONFIG, arch=arch))
    assert run.kept() == "kept yes"
    assert run.found() == "nothing"
    run.write("/kprobe_events", f"p:gone vfs_open\n{DEFINITIONS}")
    run.write("/kprobe_events", "-:gone\n", os.O_WRONLY | os.O_APPEND)
    run.mount.mkdir(CLIENT, "/tracing/instances/slow", 0o755)
    run.mount.mkdir(CLIENT, "/tracing/instances/no", 0o755)
    run.mount.rmdir(CLIENT, "/tracing/instances/no")
    run.write("/tracing/events/kprobes/reads/filter", "count > 5 && count < 100")
    run.write("/tracing/events/kprobes/reads/trigger", "stacktrace if count == 1000")
    run.write("/tracing/options/sym-offset", "1")
    for where in ("/tracing", "/tracing/instances/slow"):
        run.write(f"{where}/events/kprobes/reads/enable", "1")
    run.write("/kprobes/stats/kprobes/writes/enabled", "0")
    with pytest.raises(OSError, match="this file's kind of event"):
        run.write("/kprobe_events", "p:half vfs_write\nnonsense\n")
    run.hit(40)
    run.write("/tracing/trace_marker", "here")
    names = ("definitions", "probes")
    before = {name: run.read(f"/machine/{name}") for name in names}
    records = {where: run.records(where) for where in ("/tracing", "/tracing/instances/slow")}
    identity = run.read("/tracing/events/kprobes/reads/id")
    run.mount.close()
    run.die()
    assert "kprobes/half" in before["definitions"]

    again = Run(place, replace(CONFIG, arch=arch))
    text = again.read("/machine/definitions")
    assert "".join(
        line for line in text.splitlines(True) if not line.startswith("instances/last")
    ) == "".join(
        line for line in before["definitions"].splitlines(True) if not line.startswith("instances/last")
    )
    told = [json.loads(line) for line in again.read("/machine/probes").splitlines()]
    for was, now in zip([json.loads(line) for line in before["probes"].splitlines()], told, strict=True):
        for field in ("event", "enabled", "nmissed"):
            assert now[field] == was[field], field
        # Reading a file of the mount hits the probe, too.
        assert was["hits"] <= now["hits"] <= was["hits"] + 20
    assert again.read("/tracing/events/kprobes/reads/id") == identity
    assert len(records["/tracing"]) == 36
    assert again.records("/tracing/instances/last") == records["/tracing"]
    slow = records["/tracing/instances/slow"]
    assert again.records("/tracing/instances/last.slow")[: len(slow)] == slow
    assert again.found().endswith(" records, 0 torn")
    assert not again.records("/tracing")
    again.hit(10)
    assert len(again.records("/tracing")) == 5
    # The third and the fourth daemon show these records as the last ones, because neither adds a record.
    again.die()
    third = Run(place, replace(CONFIG, arch=arch))
    assert len(third.records("/tracing/instances/last")) == 5
    third.write("/tracing/events/kprobes/reads/enable", "0")
    third.die()
    fourth = Run(place, replace(CONFIG, arch=arch))
    assert len(fourth.records("/tracing/instances/last")) == 5
    fourth.end()


def test_records_of_then_are_printed_as_then(copied: Path) -> None:
    run = Run(copied)
    before = run.records("/tracing/instances/last")
    assert len(before) == 60
    run.write("/tracing/events/kprobes/reads/enable", "0")
    run.write("/tracing/instances/slow/events/kprobes/reads/enable", "0")
    run.write("/kprobe_events", "-:reads\n", os.O_WRONLY | os.O_APPEND)
    run.write("/kprobe_events", "p:reads vfs_write\n", os.O_WRONLY | os.O_APPEND)
    assert run.records("/tracing/instances/last") == before
    run.write("/machine/power", "reboot\n")
    assert [line for line in run.records("/tracing/instances/last") if "count=" in line] == before
    assert run.kept() == "kept yes"
    run.mount.rmdir(CLIENT, "/tracing/instances/last")
    run.end()


def test_a_torn_record_is_counted(copied: Path) -> None:
    run = Run(copied)
    run.hit(12)
    run.write("/tracing/tracing_on", "0")
    before = run.records("/tracing")
    layout = run.kernel.machine.records.persistent_layout
    top = array_places(run.kernel)[0]
    run.die()
    torn = 0
    with records_of(copied).open("r+b") as file:
        for cpu, control in product(range(CONFIG.cpus), top.controls):
            at = layout.cells(cpu, control, CONTROL_SIZE)
            file.seek(at)
            words = RingControl.from_buffer_copy(file.read(CONTROL_SIZE))
            if words.tail_entries and not torn:
                # Cut off the end of the last record, as if a writer were in the middle of it.
                word = "write_ptr" if words.write_ptr else "parked_ptr"
                setattr(words, word, getattr(words, word) - 4)
                file.seek(at)
                torn += file.write(words) == CONTROL_SIZE
    assert torn == 1
    again = Run(copied)
    assert again.found().endswith(" records, 1 torn")
    whole = again.records("/tracing/instances/last")
    assert len(whole) == len(before) - 1
    assert set(whole) < set(before)
    again.end()


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
def test_a_hit_costs_what_it_costs_without(place: Path, arch: str) -> None:
    """A hit of an optimized probe that records takes the same number of guest instructions with --state as
    without.
    """
    config = replace(CONFIG, arch=arch)
    run, taken = Run(place, config), []
    with Kernel(config) as without:
        for kernel in (run.kernel, without):
            bare = instructions_a_call(kernel, FUNCTION, 1)
            with kernel.lock:
                kernel.tracing.kprobe_events.write(f"p:turn {FUNCTION}+5 n=%ax\n".encode())
                event = kernel.tracing.system.events.find("kprobes", "turn")
                assert event is not None
                kernel.trace_arrays.top.events.set_enabled(event, True)
                assert kernel.kprobes.optimizer is not None
                kernel.kprobes.optimizer.flush()
                assert "[OPTIMIZED]" in "".join(kernel.kprobes.list_records(0))
            taken.append(instructions_a_call(kernel, FUNCTION, 1, calls=6).all - bare.all)
    assert run.kept() == "kept yes"
    assert len(run.records("/tracing")) == 6
    assert taken[0] == taken[1] > 20
    run.end()


def test_a_reboot_is_kept_too(copied: Path) -> None:
    run = Run(copied)
    run.hit(7)
    run.write("/machine/power", "reboot\n")
    run.hit(3)
    run.die()
    again = Run(copied)
    assert [line.count("reads") for line in again.records("/tracing/instances/last")].count(1) == 10
    assert len(list(copied.glob("records.*"))) == 1
    again.end()


def test_snapshots_are_kept(place: Path) -> None:
    run = Run(place)
    run.write("/kprobe_events", DEFINITIONS)
    run.write("/tracing/events/kprobes/reads/enable", "1")
    for number in range(1, 4):
        run.write("/tracing/tracing_on", "1")
        run.hit(10 * number)
        run.write("/tracing/snapshot", "1")
        run.hit(1)
        run.write("/tracing/tracing_on", "0")
        before = run.records("/tracing"), run.read("/tracing/snapshot")
        run.die()
        run = Run(place)
        assert run.records("/tracing/instances/last") == before[0]
        assert run.read("/tracing/instances/last/snapshot") == before[1]
    run.end()


def test_a_journal_is_written_anew(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_state, "COMPACT_SIZE", 20_000)
    run = Run(place)
    for number in range(150):
        run.write("/kprobe_events", f"p:e{number} vfs_read\n", os.O_WRONLY | os.O_APPEND)
        run.write("/tracing/trace_options", "nosym-addr" if number % 2 else "sym-addr")
    assert (place / "journal").stat().st_size < 60_000
    run.write("/kprobe_events", "-:e7\n", os.O_WRONLY | os.O_APPEND)
    before = run.read("/kprobe_events")
    run.die()
    again = Run(place)
    assert again.read("/kprobe_events") == before
    again.end()


def test_a_long_write_comes_in_parts(place: Path) -> None:
    run = Run(place)
    text = b"p:first vfs_read\n" + 4000 * (b"#" + 40 * b"-" + b"\n") + b"p:second vfs_write\n"
    handle = run.open("/kprobe_events", os.O_WRONLY | os.O_TRUNC)
    at = text.index(b"p:second") + 4
    for part in (text[:at], text[at:]):
        assert run.mount.write(CLIENT, handle, part, 0) == len(part)
    run.mount.release(handle)
    before = run.read("/kprobe_events")
    assert before.count("\n") == 2
    run.die()
    again = Run(place)
    assert again.read("/kprobe_events") == before
    again.end()


def test_what_others_do_between_the_lines_of_a_write(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client enables an event that a long write of another client has just defined.

    The next daemon restores both changes.
    """
    run = Run(place)
    left: list[str] = []

    def yield_lock(_lock: ControlLock) -> None:
        if not left:
            left.append(run.read("/kprobe_events"))
            run.write("/tracing/events/kprobes/e0/enable", "1")

    monkeypatch.setattr(ControlLock, "yield_lock", yield_lock)
    run.write("/kprobe_events", "".join(f"p:e{number} vfs_read\n" for number in range(100)))
    before = run.read("/kprobe_events")
    assert 0 < left[0].count("\n") < before.count("\n") == 100
    run.die()
    again = Run(place)
    assert again.read("/kprobe_events") == before
    assert again.read("/tracing/events/kprobes/e0/enable") == "1\n"
    again.end()


def test_long_writes_of_two_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of two long writes alternate, with a third client's write in between.

    The next daemon restores all definitions.
    """
    monkeypatch.setattr(saved_state, "COMPACT_SIZE", 1 << 30)
    run = Run(place)
    run.write("/kprobe_events", "p:there vfs_read\n")
    first, second = (run.open("/kprobe_events", os.O_WRONLY | os.O_APPEND) for _ in range(2))
    filler = 3200 * (b"#" + 40 * b"-" + b"\n")
    for handle, part in (
        (first, filler + b"p:first vfs_"),
        (second, filler + b"p:second vf"),
        (first, b"write\n" + filler + b"p:th"),
        (second, b"s_open\n"),
        (first, b"ird vfs_fsync\n"),
    ):
        assert run.mount.write(CLIENT, handle, part, 0) == len(part)
        run.write("/tracing/events/kprobes/there/enable", "1")
    run.mount.release(second)
    run.mount.release(first)
    before = run.read("/kprobe_events")
    assert sorted(before.split()[::2]) == [
        f"p:kprobes/{name}" for name in ("first", "second", "there", "third")
    ]
    run.die()
    again = Run(place)
    assert again.read("/kprobe_events") == before
    again.end()


def test_what_was_released_is_closed_again(place: Path) -> None:
    """While the next daemon restores the state, it closes files that clients had released, so that instances
    can be removed.
    """
    run = Run(place)
    for number in range(30):
        run.mount.mkdir(CLIENT, "/tracing/instances/short", 0o755)
        run.write("/tracing/instances/short/tracing_on", "0")
        run.mount.rmdir(CLIENT, "/tracing/instances/short")
        run.write("/kprobe_events", f"p:e{number} vfs_read\n", os.O_WRONLY | os.O_APPEND)
    before = run.read("/kprobe_events")
    run.die()
    again = Run(place)
    assert again.read("/kprobe_events") == before
    assert "short" not in [entry.name for entry in again.mount.readdir("/tracing/instances")]
    again.end()


def test_a_journal_isnt_written_anew_between_the_parts_of_a_write(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_state, "COMPACT_SIZE", 1000)
    run = Run(place)
    filler = 3200 * (b"#" + 40 * b"-" + b"\n")
    handle = run.open("/kprobe_events", os.O_WRONLY | os.O_TRUNC)
    for part in (b"p:first vfs_read\n" + filler, filler + b"p:sec", b"ond vfs_write\np:third vfs_open\n"):
        assert run.mount.write(CLIENT, handle, part, 0) == len(part)
        assert run.living._state is not None
        run.living._state._append({"counts": {}})
    run.mount.release(handle)
    before = run.read("/kprobe_events")
    assert before.count("\n") == 3
    run.die()
    again = Run(place)
    assert again.read("/kprobe_events") == before
    again.write("/tracing/trace_options", "sym-addr")
    assert (place / "journal").stat().st_size < 60_000
    again.end()


def test_directories_that_are_called_as_files(place: Path) -> None:
    names = {"trace", "trace_pipe", "free_buffer", "error_log"}
    run = Run(place)
    for name in names:
        run.mount.mkdir(CLIENT, f"/tracing/instances/{name}", 0o755)
    run.write("/tracing/instances/trace/trace_options", "sym-addr")
    run.mount.mkdir(CLIENT, "/tracing/instances/last.mine", 0o755)
    run.mount.rmdir(CLIENT, "/tracing/instances/error_log")
    run.die()
    again = Run(place)
    assert set(again.kernel.trace_arrays.names()) == names - {"error_log"} | {"last"}
    assert "\nsym-addr\n" in again.read("/tracing/instances/trace/trace_options")
    again.end()


def test_no_limit_is_for_records_of_then(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(copied, replace(CONFIG, limits=Limits({Limit.INSTANCES: 0})))
    assert "tracing/instances/slow: " in caplog.text
    assert run.kept() == "kept yes"
    assert list(run.kernel.trace_arrays.names()) == ["last", "last.slow"]
    before = [run.records(f"/tracing/instances/{name}") for name in ("last", "last.slow")]
    assert [len(each) for each in before] == [60, 60]
    assert "instances 0 0\n" in run.read("/machine/limits")
    run.write("/machine/power", "reboot\n")
    after = [run.records(f"/tracing/instances/{name}") for name in ("last", "last.slow")]
    assert [[line for line in each if "count=" in line] for each in after] == before
    with pytest.raises(KernelError, match="limit of instances"):
        run.mount.mkdir(CLIENT, "/tracing/instances/one", 0o755)
    run.end()
    caplog.clear()


def test_an_image_that_is_replaced(place: Path, tmp_path: Path) -> None:
    image = tmp_path / "vmlinux"
    image.write_bytes((PREBUILT / "x86_64" / "vmlinux").read_bytes())
    run = Run(place, replace(CONFIG, image=image))
    run.write("/kprobe_events", DEFINITIONS)
    kept = saved_state.fingerprint(run.kernel)
    image.write_bytes(b"another")
    assert saved_state.fingerprint(run.kernel) == kept
    image.unlink()
    assert saved_state.fingerprint(run.kernel) == kept == head_of(place)["kernel"]
    run.end()


def test_records_of_now_behind_those_of_then(copied: Path) -> None:
    run = Run(copied)
    last = "/tracing/instances/last"
    before = run.records(last)
    run.write("/kprobe_events", "p:late vfs_read\n", os.O_WRONLY | os.O_APPEND)
    run.write(f"{last}/events/kprobes/late/enable", "1")
    run.write(f"{last}/tracing_on", "1")
    run.hit(2)
    run.write(f"{last}/tracing_on", "0")
    after = run.records(last)
    assert [line for line in after if "reads" in line] == before
    assert sum(": late: (vfs_read" in line for line in after) >= 2
    assert "Unknown type" not in "".join(after)
    array = run.living._kernel.trace_arrays.find("last")
    assert array is not None
    assert array.array._past is not None
    run.write(f"{last}/trace", "", os.O_WRONLY | os.O_TRUNC)
    assert array.array._past is None
    assert not run.records(last)
    run.end()


def test_records_of_instances_with_the_longest_names(place: Path) -> None:
    """Previous records of instances get distinct names of at most 255 bytes, even if long names differ only
    in the last bytes.
    """
    many = "n" * 248
    names = [f"{many}nn", f"{many}nnn", f"{many}nnnnnnn", f"{many}nnnnnnm", "n" + "\u00e4" * 127, f"{many}~1"]
    run = Run(place)
    for number, name in enumerate(names):
        run.mount.mkdir(CLIENT, f"/tracing/instances/{name}", 0o755)
        run.write(f"/tracing/instances/{name}/trace_marker", f"of {number}")
    run.die()
    again = Run(place)
    instances = again.kernel.trace_arrays.names()
    last = [name for name in instances if name.startswith("last.")]
    assert f"last.{names[0]}" in last
    assert all(len(os.fsencode(name)) <= 255 for name in last)
    told = {again.records(f"/tracing/instances/{name}")[0].rpartition(": ")[2] for name in last}
    assert told == {f"of {number}" for number in range(len(names))}
    again.end()


@pytest.mark.parametrize("pending", [False, True])
def test_counts_are_saved_without_a_later_request(
    place: Path, monkeypatch: pytest.MonkeyPatch, pending: bool
) -> None:
    """Counts are saved by time, and no timer runs afterwards.

    `pending`: when the time comes, the file system does not answer, and a change is in the queue.
    """
    timers: list[Callable[[], None]] = []

    class Timer:
        daemon = False

        def __init__(self, seconds: float, function: Callable[[], None]) -> None:
            assert seconds <= saved_state.COUNTS_AGE == 1
            self.function = function

        def start(self) -> None:
            timers.append(self.function)

        def cancel(self) -> None:
            """Ignore the end of the daemon."""

    monkeypatch.setattr(threading, "Timer", Timer)
    run = Run(place)
    state = run.living._state
    assert state is not None
    # The file is closed after the last change, and no request waits for that entry.
    run.write("/kprobe_events", "p:far gcd+5\n")
    run.write("/tracing/events/kprobes/far/enable", "1")
    for _ in range(4):
        run.kernel.call("gcd", 12, 18)
    assert len(timers) == 1
    if pending:
        with state._writing:
            timers.pop()()
        assert len(timers) == 1
    timers.pop()()
    assert timers == []
    run.die()
    again = Run(place)
    assert again.read("/kprobe_profile").split() == ["far", "4", "0"]
    again.end()


def test_a_file_system_that_does_not_answer(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer waits until its change is in the journal.

    Readers, and writers that change no state, do not wait.
    """
    append = Journal.append
    begun, answers = Event(), Event()

    def slow(journal: Journal, data: bytes) -> None:
        begun.set()
        assert answers.wait(60)
        append(journal, data)

    run = Run(place)
    monkeypatch.setattr(Journal, "append", slow)
    with ThreadPoolExecutor() as threads:
        try:
            first = threads.submit(run.write, "/kprobe_events", "p:one vfs_read\n")
            assert begun.wait(60)
            assert "vfs_read" in run.read("/kprobes/list")
            second = threads.submit(run.write, "/kprobe_events", "p:two vfs_write\n")
            while "two" not in run.read("/kprobe_events"):
                pass
            run.write("/tracing/trace_marker", "others")
            run.mount.release(run.open("/tracing/trace"))
            assert not first.done()
            assert not second.done()
            kept = read_journal(place / "journal")
            assert "vfs_read" not in str(kept)
        finally:
            answers.set()
        first.result(60)
        second.result(60)
    run.die()
    assert [entry["data"] for entry in read_journal(place / "journal").entries if "write" in entry] == [
        "p:one vfs_read\n",
        "p:two vfs_write\n",
    ]
    again = Run(place)
    assert again.read("/kprobe_events") == "p:kprobes/one vfs_read\np:kprobes/two vfs_write\n"
    again.end()


def test_the_change_of_a_dropped_journal_is_in_the_next(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A change that could not be written to the journal is saved later, together with the next change."""
    append = Journal.append
    failures = [OSError(errno.EIO, "input/output error")]

    def failing(journal: Journal, data: bytes) -> None:
        if failures:
            raise failures.pop()
        append(journal, data)

    monkeypatch.setattr(saved_state, "RETRY_PAUSE", 0.0)
    run = Run(place)
    monkeypatch.setattr(Journal, "append", failing)
    run.write("/kprobe_events", "p:one vfs_read\n")
    assert run.kept() == "kept no: input/output error"
    run.write("/kprobe_events", "p:two vfs_write\n", os.O_WRONLY | os.O_APPEND)
    assert run.kept() == "kept yes"
    run.die()
    again = Run(place)
    assert again.read("/kprobe_events") == "p:kprobes/one vfs_read\np:kprobes/two vfs_write\n"
    again.end()
