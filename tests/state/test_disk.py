"""--state DIR where nothing can be saved: the daemon serves requests and reports that changes are
not kept.
"""

from __future__ import annotations

import errno
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.machine.memory import record_memory
from emulated_kernel.trace.array.previous_boot import PreviousBootRecords
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.ring.buffer import RingBuffer
from emulated_kernel.trace.ring.ring_layout import RingMemory
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from kprobefs.common.errors import CliError
from kprobefs.daemon.state import journal, previous_boot
from kprobefs.daemon.state.saved_state import RETRY_PAUSE
from kprobefs.daemon.state.state_directory import StateDirectory
from tests.state.life import DEFINITIONS, Run, head_of

pytestmark = pytest.mark.usefixtures("objects_excluded")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a file system of 6 MiB, and yield its directory. Skip the test if the user may not mount."""
    directory = tmp_path / "disk"
    directory.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=6m,mode=700", "tmpfs", str(directory)]
    if os.geteuid():
        pytest.skip("mounting a file system needs root")
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if "permission denied" in made.stderr:
        pytest.skip(f"root may not mount here: {made.stderr.strip()}")
    assert made.returncode == 0, made.stderr
    yield directory
    subprocess.run(["umount", "-l", str(directory)], check=True)


def fill(directory: Path) -> Path:
    """Fill the file system of `directory` with one file, and return the path of the file."""
    path = directory / "ballast"
    with suppress(OSError), path.open("wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
    return path


def test_records_that_have_no_room(
    copied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """If memory suffices for only one of two instances with previous records, this instance and the
    definitions are restored.
    """
    memory_for, asked = TraceArray.memory_for, []

    def full(array: TraceArray, past: PreviousBootRecords) -> list[RingMemory]:
        asked.append(past)
        if len(asked) == 2:
            raise KernelError(errno.ENOMEM, "no bytes for a ring buffer")
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
    """Make every mapping of memory for records fail, also the mapping of anonymous memory."""

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

    monkeypatch.setattr(previous_boot, "show_empty", refuse)


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
    assert "later changes are not kept" in caplog.text
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
    with pytest.raises(OSError, match="bytes; choose smaller sizes"):
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
        with pytest.raises(CliError, match="not a private directory of yours"):
            StateDirectory(str(tmp_path / name))
    (tmp_path / "file").touch()
    with pytest.raises(CliError, match="Not a directory"):
        StateDirectory(str(tmp_path / "file"))
    with pytest.raises(CliError, match="No such file"):
        StateDirectory(str(tmp_path / "no" / "where"))


def test_killed_while_a_buffer_grows_in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the daemon is killed while a buffer grows, the buffer's records are lost, as documented.

    No other bytes become records.
    """
    run = Run(place, MachineConfig())
    records = run.kernel.machine.records
    # The larger a buffer is, the longer its preparation takes.
    records.alloc_pages((records.pages_size - records.pages_used) // 10 * 9)
    most = (records.pages_size - records.pages_used) >> 10
    run.write("/tracing/buffer_size_kb", f"{most * 6 // 10}\n")
    run.write("/kprobe_events", DEFINITIONS)
    run.write("/tracing/events/kprobes/reads/enable", "1")
    run.hit(50)

    def killed(*_arguments: object) -> None:
        raise SystemExit

    with monkeypatch.context() as patch, suppress(SystemExit):
        patch.setattr(RingBuffer, "_format", killed)
        run.write("/tracing/buffer_size_kb", f"{most * 8 // 10}\n")
    run.die()
    again = Run(place, MachineConfig())
    assert again.found() == "0 records, 0 torn"
    assert again.records("/tracing/instances/last") == []
    assert again.read("/kprobe_events").startswith("p:kprobes/reads vfs_read")
    again.hit(5)
    assert again.records("/tracing")
    again.end()
