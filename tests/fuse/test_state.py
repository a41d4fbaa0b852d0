"""--state DIR: what a daemon leaves, and what the next one makes of it, whatever became of the files."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random
from typing import BinaryIO

import pytest

from emulated_kernel.config import MachineConfig
from emulated_kernel.errors import KernelError, WouldBlock
from emulated_kernel.image.image import PREBUILT
from emulated_kernel.kernel import Kernel
from emulated_kernel.limits import Limit, Limits
from emulated_kernel.machine.memory import record_memory
from emulated_kernel.trace.array.past import PastRecords
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.ring.layout import CONTROL_SIZE, PARKED_PTR, TAIL_ENTRIES, WRITE_PTR, RingMemory
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.trees.layout import RootLayout
from kprobefs import journal, last_records, state
from kprobefs.bench import FUNCTION
from kprobefs.cli import main
from kprobefs.contention import instructions_a_call
from kprobefs.failure import Exit, Failure
from kprobefs.last_records import array_places
from kprobefs.options import MountOptions, build_kernel
from kprobefs.power import LivingKernel
from kprobefs.state import RETRY_PAUSE, KeptState
from kprobefs.state_directory import ATTEMPTS, Attempts, StateDirectory
from tests.endurance.state_kills import state_kills
from tests.fuse.harness import REAL_PROGRAM, daemon, kprobefs, needs_fuse
from tests.sample import fewer

CONFIG = MachineConfig(cpus=2)
CLIENT = Client(os.getpid(), 0, 0)
DEFINITIONS = """\
p:reads vfs_read count=$arg3 from=+0($arg2):u8
p:writes vfs_write
"""


class Run:
    """A daemon's life, without the FUSE around it."""

    def __init__(self, directory: Path, config: MachineConfig = CONFIG) -> None:
        self.directory = StateDirectory(str(directory))
        self.living = LivingKernel(config, RootLayout.FULL, Owner(0, 0), state=KeptState(self.directory, ""))
        self.mount, self.kernel = self.living.mount, self.living._kernel

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        return self.mount.open(CLIENT, path, flags)

    def write(self, path: str, text: str, flags: int = os.O_WRONLY) -> None:
        handle = self.open(path, flags)
        try:
            self.mount.write(CLIENT, handle, text.encode(), 0)
        finally:
            self.mount.release(handle)

    def read(self, path: str) -> str:
        handle, data = self.open(path), b""
        while part := self.mount.read(CLIENT, handle, 1 << 16, len(data)):
            data += part
        self.mount.release(handle)
        return data.decode("utf-8", "surrogateescape")

    def records(self, path: str) -> list[str]:
        return [line for line in self.read(f"{path}/trace").splitlines() if not line.startswith("#")]

    def hit(self, count: int) -> None:
        file = self.mount.create(CLIENT, "/scratch/x", 0o600, os.O_RDWR | os.O_CREAT)
        for size in range(1, count + 1):
            self.mount.read(CLIENT, file, size, 0)
        self.mount.release(file)

    def kept(self) -> str:
        """What machine/state says of whether there is a state."""
        return self.read("/machine/state").splitlines()[1]

    def found(self) -> str:
        return self.read("/machine/state").splitlines()[2].removeprefix("last ")

    def die(self) -> None:
        """As kill -9: nothing is written any more."""
        self.mount.watcher = None
        if self.living._state is not None and self.living._state._timer is not None:
            self.living._state._timer.cancel()
        self._close()

    def _close(self) -> None:
        self.directory.close()
        self.living._kernel.close()
        self.living._processes.close()

    def end(self) -> None:
        self.mount.close()
        self._close()


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "state"


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state with definitions and records."""
    directory = tmp_path_factory.mktemp("left") / "state"
    run = Run(directory)
    run.write("/kprobe_events", DEFINITIONS)
    run.mount.mkdir(CLIENT, "/tracing/instances/slow", 0o755)
    for where in ("/tracing", "/tracing/instances/slow"):
        run.write(f"{where}/events/kprobes/reads/enable", "1")
    run.hit(60)
    run.end()
    return directory


@pytest.fixture
def copied(left: Path, place: Path) -> Path:
    """A state of its own for a test."""
    subprocess.run(["cp", "-a", "--sparse=always", str(left), str(place)], check=True)
    return place


def own(definitions: str) -> list[str]:
    """But for what is about an earlier kernel's records."""
    return [line for line in definitions.splitlines() if not line.startswith("instances/last")]


def head_of(directory: Path) -> dict[str, object]:
    return journal.read(directory / "journal").entries[0]


def records_of(directory: Path) -> Path:
    return directory / str(head_of(directory)["records"])


def rewrite(directory: Path, change: Callable[[list[journal.Entry]], None]) -> None:
    """Another journal, each entry of which is whole."""
    entries = journal.read(directory / "journal").entries
    change(entries)
    journal.Journal(directory / "journal", entries).close()


# Coming back


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
    with pytest.raises(OSError, match="another kind"):
        run.write("/kprobe_events", "p:half vfs_write\nnonsense\n")
    run.hit(40)
    run.write("/tracing/trace_marker", "here")
    names = ("definitions", "probes")
    before = {name: run.read(f"/machine/{name}") for name in names}
    records = {where: run.records(where) for where in ("/tracing", "/tracing/instances/slow")}
    identity = run.read("/tracing/events/kprobes/reads/id")
    run.mount.close()
    run.die()
    assert "kprobes/half" in before["definitions"] or "p:kprobes/half" in before["definitions"]

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
        # To look is to hit.
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
    # The next one has these as its last, though it makes none itself, and the one behind it.
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
    layout = run.kernel.machine.records.kept_layout
    top = array_places(run.kernel)[0]
    run.die()
    torn = 0
    with records_of(copied).open("r+b") as file:
        for cpu, control in product(range(CONFIG.cpus), top.controls):
            at = layout.cells(cpu, control, CONTROL_SIZE)
            file.seek(at)
            words = memoryview(bytearray(file.read(CONTROL_SIZE))).cast("Q")
            if words[TAIL_ENTRIES] and not torn:
                # The end of its last record isn't there yet.
                words[WRITE_PTR if words[WRITE_PTR] else PARKED_PTR] -= 4
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
    """The same guest instructions, in an optimized probe that records."""
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
    monkeypatch.setattr(state, "COMPACT_SIZE", 20_000)
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


def test_long_writes_of_two_at_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts of one come between those of the other, and a third's write between both."""
    monkeypatch.setattr(state, "COMPACT_SIZE", 1 << 30)
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
    """An instance can go once nobody has a file of its open; many files were open, one after the other."""
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
    monkeypatch.setattr(state, "COMPACT_SIZE", 1000)
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
    kept = state.fingerprint(run.kernel)
    image.write_bytes(b"another")
    assert state.fingerprint(run.kernel) == kept
    image.unlink()
    assert state.fingerprint(run.kernel) == kept == head_of(place)["kernel"]
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


# Damage


def cut(part: float) -> Callable[[Path], None]:
    return lambda path: os.truncate(path, int(path.stat().st_size * part))


def garbage(path: Path) -> None:
    path.write_bytes(Random(1).randbytes(20_000))


def nothing(path: Path) -> None:
    path.write_bytes(b"")


def directory_there(path: Path) -> None:
    path.unlink()
    path.mkdir()


def link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def missing(path: Path) -> None:
    path.unlink()


DAMAGE = [cut(0.2), cut(0.7), garbage, nothing, directory_there, link_to_itself]


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_journal(
    copied: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(copied / "journal")
    run = Run(copied)
    assert run.kept() == "kept yes"
    assert "aside" in caplog.text
    run.write("/kprobe_events", "p:new vfs_open\n", os.O_WRONLY | os.O_APPEND)
    assert (copied / "aside.journal").exists() or (copied / "aside.journal").is_symlink()
    run.die()
    again = Run(copied)
    assert "p:kprobes/new vfs_open\n" in again.read("/kprobe_events")
    again.end()
    caplog.clear()


@pytest.mark.parametrize("damage", [*DAMAGE, missing])
def test_damaged_records(
    copied: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(records_of(copied))
    run = Run(copied)
    assert run.kept() == "kept yes"
    assert run.read("/kprobe_events").startswith("p:kprobes/reads vfs_read")
    assert not run.records("/tracing/instances/last")
    assert records_of(copied).name in caplog.text
    run.end()
    caplog.clear()


@pytest.mark.parametrize("seed", range(fewer(30, 6)))
def test_records_with_wrong_bytes(copied: Path, seed: int, caplog: pytest.LogCaptureFixture) -> None:
    random, path = Random(seed), records_of(copied)
    with path.open("r+b") as file:
        extents = [(0, 530_000), (528_384, 2 << 20)]
        for _ in range(random.choice((1, 50, 5000))):
            start, size = random.choice(extents)
            file.seek(start + random.randrange(size))
            file.write(random.randbytes(random.choice((1, 4, 300))))
    run = Run(copied)
    for name in (name for name in run.kernel.trace_arrays.names() if name.startswith("last")):
        for file in ("trace", "snapshot", "per_cpu/cpu0/trace", "per_cpu/cpu0/stats"):
            run.read(f"/tracing/instances/{name}/{file}")
        for option in ("raw", "hex", "bin", "verbose", "latency-format"):
            run.write(f"/tracing/instances/{name}/trace_options", option)
            run.read(f"/tracing/instances/{name}/trace")
            run.write(f"/tracing/instances/{name}/trace_options", f"no{option}")
        pipe = run.open(f"/tracing/instances/{name}/trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
        with suppress(WouldBlock):
            while run.mount.read(CLIENT, pipe, 1 << 16, 0):
                pass
        run.mount.give_up(CLIENT, pipe, errno.EAGAIN)
        run.mount.release(pipe)
    assert run.kept() == "kept yes"
    run.end()
    caplog.clear()


def test_another_version(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    rewrite(copied, lambda entries: entries[0].update({"kprobefs state": 2}))
    run = Run(copied)
    assert "of version 2; this program reads 1: set aside" in caplog.text
    assert run.read("/kprobe_events") == ""
    assert run.kept() == "kept yes"
    run.end()
    caplog.clear()


SENSELESS: list[Callable[[list[journal.Entry]], None]] = [
    lambda entries: entries[0].pop("records"),
    lambda entries: entries[0].update({"records": "../../etc/passwd"}),
    lambda entries: entries[0].update({"names": "here"}),
    lambda entries: entries[0].update({"ids": {"x": 1}}),
    lambda entries: entries.append({"lines": [1, None]}),
    lambda entries: entries.append({"write": "kprobe_events", "handle": 1, "data": "\u1234", "failed": 0}),
    lambda entries: entries.append({"counts": {"kprobes/reads": [["many", None]]}}),
    lambda entries: entries.append({"arrays": [{"name": 1}]}),
    lambda entries: entries.append({"arrays": 7}),
]


@pytest.mark.parametrize("change", SENSELESS)
def test_a_journal_without_sense(
    copied: Path, change: Callable[[list[journal.Entry]], None], caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(copied, change)
    run = Run(copied)
    assert run.kept() == "kept yes"
    assert "state in" in caplog.text
    run.hit(1)
    run.end()
    caplog.clear()


@pytest.mark.parametrize("other", [replace(CONFIG, cpus=1), replace(CONFIG, arch="riscv64")])
def test_records_of_another_kernel(
    copied: Path, other: MachineConfig, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(copied, other)
    assert "records of another kernel" in caplog.text
    assert run.read("/kprobe_events").startswith("p:kprobes/reads vfs_read")
    assert not run.records("/tracing/instances/last")
    assert (copied / "aside.records").exists()
    run.end()
    caplog.clear()


def test_a_state_that_ends_the_daemon(copied: Path, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(ATTEMPTS):
        assert Attempts(copied / "attempts").begin()
    run = Run(copied)
    assert "the daemon ended each time" in caplog.text
    assert run.read("/kprobe_events") == ""
    run.end()
    caplog.clear()
    again = Run(copied)
    assert not caplog.text
    again.end()


# Where nothing can be kept


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 6 MiB."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m,mode=700", "tmpfs", str(directory)]
    if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no file system can be mounted here")
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """Leave no room on a disk."""
    path = directory / "ballast"
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path


def test_records_that_have_no_room(
    copied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with buffers of more than half of all pages."""
    memory_for, asked = TraceArray.memory_for, []

    def full(array: TraceArray, past: PastRecords) -> list[RingMemory]:
        asked.append(past)
        if len(asked) == 2:
            raise MemoryError("no bytes for a ring buffer")
        return memory_for(array, past)

    monkeypatch.setattr(TraceArray, "memory_for", full)
    run = Run(copied)
    assert "instances/last.slow: no bytes for a ring buffer" in caplog.text
    assert run.found() == "60 records, 0 torn"
    assert run.kept() == "kept yes"
    assert run.read("/kprobe_events").startswith("p:kprobes/reads vfs_read")
    assert list(run.kernel.trace_arrays.names()) == ["slow", "last"]
    assert len(run.records("/tracing/instances/last")) == 60
    assert (copied / "aside.records").exists()
    run.end()
    caplog.clear()


def no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: StateDirectory) -> BinaryIO:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(StateDirectory, "new_records", refuse)


def no_mapping(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even of memory."""

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(record_memory, "map_over", refuse)


def no_journal(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(journal.Journal, "__init__", refuse)


def no_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Kernel) -> None:
        raise KernelError(errno.ENOMEM, "no bytes for a ring buffer")

    monkeypatch.setattr(last_records, "show_empty", refuse)


@pytest.mark.parametrize("refuse", [no_file, no_mapping, no_journal])
def test_a_reboot_that_cant_be_kept(
    place: Path, refuse: Callable[[pytest.MonkeyPatch], None], caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(place)
    run.write("/kprobe_events", DEFINITIONS)
    run.write("/tracing/events/kprobes/reads/enable", "1")
    run.hit(5)
    before, head = run.read("/kprobe_events"), head_of(place)
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch)
        run.write("/machine/power", "reboot\n")
    for number in range(2):
        assert run.kept() == "kept no: No space left on device"
        assert run.read("/machine/power") == "running\nboots 2\n"
        run.write("/kprobe_events", f"p:late{number} vfs_open\n", os.O_WRONLY | os.O_APPEND)
    assert head_of(place) == head
    run.die()
    again = Run(place)
    assert again.read("/kprobe_events") == before
    assert len(again.records("/tracing/instances/last")) >= 5
    with pytest.MonkeyPatch.context() as patch:
        refuse(patch)
        again.write("/machine/power", "reboot\n")
    again.write("/machine/power", "reboot\n")
    assert again.kept() == "kept yes"
    again.end()
    caplog.clear()


def test_no_room_for_an_instance_without_records(
    place: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    no_instance(monkeypatch)
    run = Run(place)
    run.write("/machine/power", "reboot\n")
    assert run.kept() == "kept yes"
    assert caplog.text.count("instances/last: ") == 2
    run.end()
    caplog.clear()


def test_a_disk_that_is_full_at_the_start(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    fill(small_disk)
    run = Run(small_disk)
    assert run.kept() == "kept no: No space left on device"
    assert "what changes from now on isn't kept" in caplog.text
    run.write("/kprobe_events", DEFINITIONS)
    run.write("/tracing/events/kprobes/reads/enable", "1")
    run.hit(30)
    assert len(run.records("/tracing")) >= 30
    run.end()
    caplog.clear()


def test_a_disk_that_gets_full(small_disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(small_disk, MachineConfig())
    run.write("/kprobe_events", DEFINITIONS)
    run.write("/tracing/events/kprobes/reads/enable", "1")
    ballast = fill(small_disk)
    run.hit(500)
    with pytest.raises(OSError, match="bytes for a ring buffer"):
        run.write("/tracing/buffer_size_kb", "9000")
    for number in range(200):
        run.write("/kprobe_events", f"p:more{number} vfs_open\n", os.O_WRONLY | os.O_APPEND)
    assert run.kept() == "kept no: No space left on device"
    ballast.unlink()
    time.sleep(RETRY_PAUSE)
    run.write("/kprobe_events", "p:late vfs_open\n", os.O_WRONLY | os.O_APPEND)
    assert run.kept() == "kept yes"
    before = run.read("/kprobe_events")
    run.die()
    again = Run(small_disk, MachineConfig())
    assert again.read("/kprobe_events") == before
    assert len(again.records("/tracing/instances/last")) >= 500
    again.end()
    caplog.clear()


def test_a_disk_that_is_read_only(small_disk: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run = Run(small_disk, MachineConfig())
    run.write("/kprobe_events", DEFINITIONS)
    run.end()
    (other := tmp_path / "other").mkdir()
    subprocess.run(["mount", "--bind", str(small_disk), str(other)], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", str(other)], check=True)
        again = Run(other, MachineConfig())
        assert again.kept() == "kept no: Read-only file system"
        assert again.read("/kprobe_events").startswith("p:kprobes/reads")
        again.write("/kprobe_events", "p:late vfs_open\n", os.O_WRONLY | os.O_APPEND)
        again.end()
    finally:
        subprocess.run(["umount", "-l", str(other)], check=True)
    caplog.clear()


def test_a_directory_that_isnt_ours(tmp_path: Path) -> None:
    for name, mode in (("loose", 0o777), ("group", 0o770)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
        with pytest.raises(Failure, match="nobody else may write to it"):
            StateDirectory(str(tmp_path / name))
    (tmp_path / "file").touch()
    with pytest.raises(Failure, match="Not a directory"):
        StateDirectory(str(tmp_path / "file"))
    with pytest.raises(Failure, match="No such file"):
        StateDirectory(str(tmp_path / "no" / "where"))


# The program


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KPROBEFS_RUNTIME_DIRECTORY", str(tmp_path / "run"))
    monkeypatch.setenv("KPROBEFS_PROBES_PATH", "")
    (tmp_path / "mnt").mkdir()
    return tmp_path / "mnt"


@needs_fuse
@pytest.mark.mounted
@pytest.mark.parametrize("layout", ["full", "tracefs"])
def test_kill_and_start_again(directory: Path, place: Path, layout: str) -> None:
    options = ("--state", str(place), "--layout", layout)
    tracing = "" if layout == "tracefs" else "tracing"
    with daemon(directory, *options, program=REAL_PROGRAM) as running:
        Path(running.path(tracing, "kprobe_events")).write_text(DEFINITIONS)
        os.mkdir(running.path(tracing, "instances", "slow"))
        Path(running.path(tracing, "events/kprobes/reads/enable")).write_text("1")
        marker = Path(running.path(tracing, "trace_marker"))
        marker.write_text("before")
        defined = Path(running.path(tracing, "kprobe_events")).read_text()
        other = kprobefs("mount", *options, str(place.with_name("other")), "--mkdir", program=REAL_PROGRAM)
        assert other.returncode == Exit.FAILURE
        assert f"--state {place}: another daemon keeps its state there" in other.stderr
        running.process.send_signal(signal.SIGKILL)
        running.process.wait()
    with daemon(directory, *options, program=REAL_PROGRAM) as running:
        assert Path(running.path(tracing, "kprobe_events")).read_text() == defined
        assert Path(running.path(tracing, "events/kprobes/reads/enable")).read_text() == "1\n"
        assert os.path.isdir(running.path(tracing, "instances", "slow"))
        last = Path(running.path(tracing, "instances/last/trace")).read_text()
        assert "tracing_mark_write: before" in last
        assert ": reads: (vfs_read" in last
        assert not running.log.count("state in")


def test_a_kernel_of_a_distribution_keeps_none(
    directory: Path, place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is mounted all the same: the units name a state whatever the options are."""
    served: list[MountOptions] = []
    monkeypatch.setattr("kprobefs.daemon.run_in_foreground", lambda options, *_more: served.append(options))
    kernel = ["--engine", "native", "--image", "host"]
    assert main(["mount", "-f", "--state", str(place), *kernel, str(directory)], build_kernel) == Exit.OK
    assert [options.state for options in served] == [None]
    assert capsys.readouterr().err == (
        "kprobefs: --state: a distribution's kernel keeps none, nothing outlives the daemon\n"
    )
    assert not place.exists()


@pytest.mark.parametrize("inside", ["", "state"])
def test_no_state_below_its_own_mount(directory: Path, inside: str) -> None:
    found = kprobefs("mount", "--state", str(directory / inside), str(directory))
    assert found.returncode == Exit.USAGE
    assert found.stderr.endswith(": has to be outside of the mount\n")
    assert not list(directory.iterdir())


def test_seeded_kills(tmp_path: Path) -> None:
    assert "kernels killed" in state_kills(tmp_path, fewer(8, 4), 0, 3)
