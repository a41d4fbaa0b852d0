"""uprobe_events: definitions, errors, and the names of events."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from threading import Event
from time import sleep

import pytest

from emulated_kernel.arch.x86.arch import X86_64
from emulated_kernel.trace.probes import uprobe_events
from emulated_kernel.trace.probes.uprobe_events import UprobeEvents
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.safe_read import MAX_BLOCKED_READERS
from tests.trace.events.kernel import Kernel, errno_of, make_kernel


@pytest.fixture
def kernel() -> Kernel:
    return make_kernel()


@pytest.fixture
def uprobes(kernel: Kernel) -> UprobeEvents:
    return UprobeEvents(X86_64(), kernel.commands)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "a-program.so"
    path.write_bytes(b"")
    return path


def error_of(kernel: Kernel, uprobes: UprobeEvents, command: str) -> str:
    """Write `command`, which must be refused. Return the errno, the error text and the column."""
    name = errno_of(lambda: uprobes.write(command.encode()))
    lines = kernel.events.error_log.records()[-1].splitlines()
    column = lines[2].index("^") - len("  Command: ")
    return f"{name} {lines[0].partition('error: ')[2]} {column}"


@pytest.mark.parametrize(
    ("definition", "shown"),
    [
        ("p:up {}:0x10", "p:uprobes/up {}:0x0000000000000010"),
        ("p:g/up {}:16 %ax $stack9999", "p:g/up {}:0x0000000000000010 arg1=%ax arg2=$stack9999"),
        ("p {}:0x10", "p:uprobes/p_a_0x10 {}:0x0000000000000010"),
        ("r {}:010 $retval:u8", "r:uprobes/p_a_0x8 {}:0x0000000000000008 arg1=$retval:u8"),
        ("p:up {}:0x10%return", "r:uprobes/up {}:0x0000000000000010"),
        ("p:up {}:0x10(0x20)", "p:uprobes/up {}:0x0000000000000010(0x20)"),
        ("p:up {}:0x10%return(8)", "r:uprobes/up {}:0x0000000000000010(0x8)"),
        (
            "p:up {}:1 s=+0(%sp):string f=@+0x8",
            "p:uprobes/up {}:0x0000000000000001 s=+0(%sp):string f=@+0x8",
        ),
        ("p10:up {}:1", "p:uprobes/p_a_0x1 {}:0x0000000000000001"),
    ],
)
def test_definitions(
    kernel: Kernel, uprobes: UprobeEvents, program: Path, definition: str, shown: str
) -> None:
    uprobes.write(definition.format(program).encode())
    assert list(uprobes.records()) == [shown.format(program) + "\n"]
    assert kernel.dynamic_events.records() == list(uprobes.records())
    assert kernel.events.probes() == []
    uprobes.write(next(uprobes.records()).replace("p:", "-:", 1).replace("r:", "-:", 1).encode())
    assert list(uprobes.records()) == []


@pytest.mark.parametrize(
    ("place", "error", "column"),
    [
        ("{}:10a", "EINVAL Invalid uprobe offset", 1),
        ("{}:10%hoge", "EINVAL Invalid probed address suffix", 3),
        ("{}:10(1a)", "EINVAL Invalid reference counter offset", 4),
        ("{}:10(10", "EINVAL Reference counter brace is not closed", 6),
        ("{}:10(10)a", "EINVAL Reference counter has wrong suffix", 7),
        ("{}:10 @+ab", "EINVAL Invalid file offset value", 4),
        ("{}:10 @symbol", "EINVAL Symbol is not available with uprobe", 4),
        ("{}:10 $arg1", "EINVAL Invalid $-variable specified", 4),
    ],
)
def test_errors(
    kernel: Kernel, uprobes: UprobeEvents, program: Path, place: str, error: str, column: int
) -> None:
    at = len(f"p {program}") + column
    assert error_of(kernel, uprobes, f"p {place.format(program)}") == f"{error} {at}"


def test_files(kernel: Kernel, uprobes: UprobeEvents, tmp_path: Path) -> None:
    assert error_of(kernel, uprobes, f"p {tmp_path}/no:1") == "ENOENT Failed to find the given file 2"
    assert error_of(kernel, uprobes, f"p {tmp_path}:1") == "EINVAL Not a regular file 2"


@pytest.mark.parametrize(
    "command", ["p", "x /a:1", "p vfs_read", "p /bin/sh", "p /bin/sh:", "p /bin/sh:x1", "p :1"]
)
def test_commands_of_other_kinds(kernel: Kernel, uprobes: UprobeEvents, command: str) -> None:
    assert errno_of(lambda: uprobes.write(command.encode())) == "EINVAL"
    assert kernel.events.error_log.records() == []


def test_probes_of_one_event(kernel: Kernel, uprobes: UprobeEvents, program: Path) -> None:
    uprobes.write(f"p:up {program}:1 a=%ax\np:up {program}:2 a=%bx\n".encode())
    for command, error in (
        (f"p:up {program}:1 a=%ax", "There is already the exact same probe event"),
        (f"p:up {program}:3 b=%ax", "Argument type or name is different from existing probe"),
        (f"r:up {program}:3 a=%ax", "Probe type is different from existing probe"),
    ):
        assert error_of(kernel, uprobes, command).startswith(f"EEXIST {error}")
    assert errno_of(lambda: uprobes.write(f"p:other {program}:1(8)".encode())) == "EINVAL"
    assert len(list(uprobes.profile_records())) == 2
    uprobes.write(b"-:up\n")
    assert (list(uprobes.records()), list(kernel.events.registry)) == ([], [])


def test_kinds_are_apart(kernel: Kernel, uprobes: UprobeEvents, program: Path) -> None:
    kernel.events.write(b"p:uprobes/k vfs_read\n")
    assert error_of(kernel, uprobes, f"p:k {program}:1").startswith("EEXIST Given group/event name")
    uprobes.write(f"p:u {program}:1\n".encode())
    kernel.events.clear()
    assert (kernel.events.probes(), len(list(uprobes.records()))) == ([], 1)
    kernel.dynamic_events.clear()
    assert list(uprobes.records()) == []


def test_they_cannot_be_enabled(kernel: Kernel, uprobes: UprobeEvents, program: Path) -> None:
    uprobes.write(f"p:u {program}:1\n".encode())
    event = kernel.events.registry.find("uprobes", "u")
    assert event is not None
    with pytest.raises(KernelError, match=rf"Errno {errno.EOPNOTSUPP}\b"):
        event.enable(kernel.recorder)
    assert not event.is_enabled
    assert "field:unsigned long __probe_ip;" in event.format_text()


def test_a_file_system_that_does_not_answer(
    uprobes: UprobeEvents, program: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A definition waits only a limited time for a file whose file system does not answer. After several late
    answers, definitions fail at once with EBUSY.
    """
    plain = os.stat
    answers = Event()
    asked: list[object] = []

    def slow(path: str | bytes | int) -> os.stat_result:
        if os.fspath(program).encode() == path:
            asked.append(path)
            answers.wait(60)
        return plain(path)

    with monkeypatch.context() as patched:
        patched.setattr(os, "stat", slow)
        patched.setattr(uprobe_events, "PATIENCE", 0.01)
        for number in range(MAX_BLOCKED_READERS + 2):
            with pytest.raises(KernelError) as refused:
                uprobes.create(f"p:u{number} {program}:0x10")
            expected = errno.EBUSY if number >= MAX_BLOCKED_READERS else errno.ETIMEDOUT
            assert refused.value.errno == expected
        assert len(asked) == MAX_BLOCKED_READERS
        answers.set()
    # The threads that were late end first.
    for _ in range(500):
        if not uprobes._files._late:
            break
        sleep(0.01)
    assert uprobes.create(f"p:answered {program}:0x10")
