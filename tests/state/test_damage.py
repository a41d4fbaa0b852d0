"""--state DIR with damaged files: the next daemon starts and reports the damage."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from random import Random

import pytest

from emulated_kernel.machine.memory.sparse import data_ranges
from emulated_kernel.trace.ring.ring_layout import CONTROL_SIZE, RingControl
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import WouldBlock
from kprobefs.daemon.state import journal
from kprobefs.daemon.state.previous_boot import array_places
from kprobefs.daemon.state.state_directory import ATTEMPTS, RestoreAttempts
from tests.sample import fewer, share
from tests.state.life import CLIENT, CONFIG, Run, records_of, rewrite


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


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


def huge(path: Path) -> None:
    """Extend a file to 1 TiB; the added part is sparse."""
    path.touch()
    os.truncate(path, 1 << 40)


def data_of(path: Path) -> dict[int, bytes]:
    """Return the pages of a file that contain data other than zeros: offset of a page -> its bytes.

    Nearly all of a file of records is a hole.
    """
    with path.open("rb") as file:
        ranges = [*data_ranges(file.fileno(), 0, path.stat().st_size)]
        pages = {}
        for start, size in ranges:
            for at in range(start, start + size, PAGE_SIZE):
                pages[at] = os.pread(file.fileno(), PAGE_SIZE, at)
    return {at: page for at, page in pages.items() if any(page)}


def full_directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    (path / "below").mkdir(parents=True)


ODD = [fifo, endless, huge, full_directory]
DAMAGE = [cut(0.2), cut(0.7), garbage, nothing, directory_there, link_to_itself, *ODD]


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
    (trouble,) = run.troubles()
    assert "aside.journal" in trouble
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
    for trouble in run.troubles():
        assert trouble.startswith("records.")
        assert ("set aside as aside.records" in trouble) is os.path.lexists(copied / "aside.records")
    assert run.troubles() or "torn" in run.found()
    run.end()
    caplog.clear()


WORDS = ("write_ptr", "base", "nr_pages", "tail_page", "tail_slot", "head_slot")


@pytest.mark.parametrize("word", share(WORDS, 3, 6))
def test_one_wrong_byte_of_the_records(copied: Path, word: str, caplog: pytest.LogCaptureFixture) -> None:
    before = Run(copied)
    before.hit(20)
    before.write("/tracing/tracing_on", "0")
    layout = before.kernel.machine.records.persistent_layout
    top = array_places(before.kernel)[0]
    wanted = before.records("/tracing")
    before.die()
    with records_of(copied).open("r+b") as file:
        for cpu, control in product(range(CONFIG.cpus), top.controls):
            at = layout.cells(cpu, control, CONTROL_SIZE)
            file.seek(at)
            words = RingControl.from_buffer_copy(file.read(CONTROL_SIZE))
            if words.tail_entries:
                wrong = word if word != "write_ptr" or words.write_ptr else "parked_ptr"
                setattr(words, wrong, getattr(words, wrong) ^ 0x4000)
                file.seek(at)
                file.write(words)
    damaged, size = data_of(records_of(copied)), records_of(copied).stat().st_size
    name = records_of(copied).name
    run = Run(copied)
    held, torn = run.records("/tracing/instances/last"), int(run.found().split()[2])
    assert len(held) + torn >= len(wanted) >= 20
    if word in ("write_ptr", "tail_page", "tail_slot"):
        assert (held, torn) == (wanted, 0)
    (trouble,) = run.troubles()
    assert trouble.startswith(f"{name}: CPU ")
    assert trouble.endswith(": set aside as aside.records")
    assert trouble in caplog.text
    assert data_of(copied / "aside.records") == damaged
    assert (copied / "aside.records").stat().st_size == size
    assert run.kept() == "kept yes"
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
        assert RestoreAttempts(copied / "attempts").begin()
    run = Run(copied)
    assert "the daemon ended each time" in caplog.text
    assert run.read("/kprobe_events") == ""
    run.end()
    caplog.clear()
    again = Run(copied)
    assert not caplog.text
    again.end()


@pytest.mark.parametrize("damage", ODD)
def test_attempts_that_are_no_number(
    copied: Path, damage: Callable[[Path], None], caplog: pytest.LogCaptureFixture
) -> None:
    damage(copied / "attempts")
    attempts = RestoreAttempts(copied / "attempts")
    assert [attempts.begin() for _ in range(ATTEMPTS + 1)] == [True] * ATTEMPTS + [False]
    attempts.end()
    damage(copied / "attempts")
    run = Run(copied)
    assert run.kept() == "kept yes"
    assert run.read("/kprobe_events").startswith("p:kprobes/reads vfs_read")
    assert not (copied / "attempts").exists()
    assert not caplog.text
    run.end()


def test_a_journal_that_cannot_be_copied(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If aside.journal can't be made, the report of the damage says this, and does not send the user to a
    missing file.
    """

    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(Path, "hardlink_to", refused)
    with open(copied / "journal", "ab") as file:
        file.write(b"no journal")
    run = Run(copied)
    (trouble,) = run.troubles()
    assert trouble.endswith("and aside.journal could not be made: Operation not permitted")
    run.end()


def test_records_that_cannot_be_renamed(copied: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    (records,) = copied.glob("records.*")
    garbage(records)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "rename", refused)
        run = Run(copied)
    (trouble,) = run.troubles()
    assert trouble.endswith(f"; can't be set aside: {records.name}")
    run.end()


def test_a_journal_of_a_terabyte_is_set_aside_without_being_copied(copied: Path) -> None:
    huge(copied / "journal")
    Run(copied).end()
    assert (copied / "aside.journal").stat().st_size == 1 << 40
    assert (copied / "journal").stat().st_size < 1 << 20


def test_the_last_number_of_records(copied: Path) -> None:
    (copied / "records.999999999").touch()
    for _ in range(2):
        run = Run(copied)
        assert run.kept() == "kept yes"
        run.hit(1)
        run.end()
    assert records_of(copied).name in ("records.1", "records.2")
