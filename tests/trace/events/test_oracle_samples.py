"""Recorded files, made again from the same commands: kprobe_events, profile, formats, trace lines."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from tests.trace.events.kernel import Function, Hit, Kernel, hit_all, make_kernel
from tests.trace.events.recorded import sample

_DI = 0xFFFFFFFF82A519E0
_TRAMPOLINE = 0xFFFFFFFF81060000
_STACK = 0xFFFFC90000393B80
_PLACES = (
    Function("vfs_mkdir", 0xFFFFFFFF8135D4F0, size=0x140),
    Function("vfs_rmdir", 0xFFFFFFFF8135CD20, size=0x200),
    Function("vfs_unlink", 0xFFFFFFFF8135DC30, size=0x280),
    Function("do_mkdirat", 0xFFFFFFFF813632A0, size=0x170),
    Function("do_sys_openat2", 0xFFFFFFFF8134A350, size=0x170),
    Function("getname_flags", 0xFFFFFFFF813624B0),
    Function("arch_rethook_trampoline", _TRAMPOLINE, size=0x60),
    Function("linux_banner", 0xFFFFFFFF82001000, fentry=False),
    Function("jiffies", 0xFFFFFFFF82A05000, fentry=False),
)


@pytest.fixture
def kernel() -> Kernel:
    """Return a kernel with the events of the samples and their recorded ids."""
    kernel = make_kernel(_PLACES, first_id=1392)
    written = re.findall(r"^WRITE ('.*') -> \d+$", sample("log.txt"), re.MULTILINE)
    assert len(written) == 22
    for literal in written:
        kernel.events.write(ast.literal_eval(literal).encode() + b"\n")
    return kernel


def test_kprobe_events(kernel: Kernel) -> None:
    assert "".join(kernel.events.records()) == sample("kprobe_events_all.txt")
    assert "".join(kernel.dynamic_events.records()) == sample("dynamic_events_all.txt")


def test_kprobe_profile(kernel: Kernel) -> None:
    recorded = sample("kprobe_profile.txt")
    for probe, line in zip(kernel.events.probes(), recorded.splitlines(), strict=True):
        probe.hits = int(line.split()[1])
    assert "".join(kernel.events.profile_records()) == recorded


def test_formats(kernel: Kernel) -> None:
    recorded = re.split(r"^=== (\S+)/format\n", sample("formats_all.txt"), flags=re.MULTILINE)
    texts = dict(zip(recorded[1::2], recorded[2::2], strict=True))
    made = {f"{event.group}/{event.name}": event.format_text() for event in kernel.events.events()}
    assert made == texts


def _lines(file: str, part: str) -> Iterator[str]:
    return (line for line in sample(file).splitlines() if part in line)


def _hit() -> Hit:
    hit = Hit(return_address=_TRAMPOLINE)
    hit.memory[_STACK] = _TRAMPOLINE.to_bytes(8, "little") + (0x27DA41000).to_bytes(8, "little")
    hit.memory[0xFFFFFFFF8135D4F0] = (0x4157413EEBBB0BE8).to_bytes(8, "little")
    names = re.findall(r"arg\d+=%(\w+)", next(_lines("kprobe_events_all.txt", "/pregs ")))
    values = re.findall(r"arg\d+=0x([0-9a-f]+)", next(_lines("trace_mixed.txt", " pregs: ")))
    for name, value in zip(names, values, strict=True):
        setattr(hit.regs, name, int(value, 16))
    assert (hit.regs.di, hit.regs.sp) == (_DI, _STACK)
    return hit


@pytest.mark.parametrize(
    "name",
    [
        "pint",
        "pregs",
        "psym",
        "pbit",
        "pnoarg",
        "poff",
        "longargs",
        "p_vfs_mkdir_0",
        "p_vfs_mkdir_9",
        "rnoarg",
    ],
)
def test_trace_lines(kernel: Kernel, name: str) -> None:
    event = kernel.events.find("kprobes", name)
    assert event is not None
    event.enable(kernel.recorder)
    hit_all(kernel, _hit())
    [(recorded_event, payload)] = kernel.recorder.entries
    assert recorded_event is event
    line = next(_lines("trace_mixed.txt", f" {name}: "))
    assert event.print_record(payload, kernel.symbols) == line.partition(f" {name}: ")[2]


@pytest.mark.parametrize("name", ["pint", "rnoarg"])
def test_trace_lines_with_addresses(kernel: Kernel, name: str) -> None:
    event = kernel.events.find("kprobes", name)
    assert event is not None
    event.enable(kernel.recorder)
    hit_all(kernel, _hit())
    text = event.print_record(kernel.recorder.entries[0][1], kernel.symbols, sym_addr=True)
    line = next(_lines("trace_opt_sym-addr_on.txt", f" {name}: "))
    # The recorded kernel's trampoline lies elsewhere.
    known = line.partition(f" {name}: ")[2]
    assert re.sub(r"kretprobe'd\] <\w+>", "", text) == re.sub(r"kretprobe'd\] <\w+>", "", known)
