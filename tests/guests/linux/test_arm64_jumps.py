"""Jumps in place of breakpoints over Debian's arm64 kernel: their hits, files and removal."""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from collections.abc import Iterator
from itertools import takewhile
from typing import Any

import pytest

from emulated_kernel.arch.analysis.reject_reason import Rejection, RejectReason
from emulated_kernel.arch.arm64.relocate import Relocation, relocation_of
from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.image.linux.module_files import ModuleFiles
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from tests.arch.arm64.moved import may_move, mover
from tests.guests.linux.processor_tests import CLIENT, counts, read, records, write
from tests.guests.linux.test_arm64 import META, SUITE
from tests.guests.linux.test_arm64_engine import OPTIMIZATION, new_engine
from tests.image.linux.debian import package

SIZE = 77
"""Number of bytes of a read that is recognized by its size."""
WORD = (1 << 64) - 1


@pytest.fixture(scope="module")
def engine() -> Iterator[LinuxEngine]:
    made = new_engine()
    yield made
    assert not made.tasks.machine.death
    assert not made.machine.text.ledger


@pytest.fixture(scope="module")
def mount(engine: LinuxEngine) -> Iterator[Mount]:
    modules = ModuleFiles(package(META, SUITE, "arm64"), engine.kernel.release)
    served = probed_mount(engine, ProcessWatch(), Owner(0, 0), modules, is_tracefs=False)
    served.release(served.create(CLIENT, "/scratch/greeting", 0o644, os.O_WRONLY))
    write(served, CLIENT, "/scratch/greeting", b"hello\n")
    yield served
    served.close()


@pytest.fixture(autouse=True)
def clean(mount: Mount, engine: LinuxEngine) -> Iterator[Mount]:
    """Yield the mount. Afterwards remove all definitions, and assert that the text is the original."""
    yield mount
    write(mount, CLIENT, "/kprobes/stages", b"0")
    write(mount, CLIENT, OPTIMIZATION, b"1")
    write(mount, CLIENT, "/tracing/events/enable", b"0\n")
    clear(mount)
    settle(engine)
    assert not engine.machine.text.ledger


def clear(mount: Mount) -> None:
    """Remove all definitions."""
    mount.release(mount.open(CLIENT, "/kprobe_events", os.O_WRONLY | os.O_TRUNC))


def settle(engine: LinuxEngine) -> None:
    assert engine.kprobes.optimizer is not None
    with engine.lock:
        engine.kprobes.optimizer.work.flush()


def listed(mount: Mount) -> list[str]:
    """Return "PLACE FLAGS" for each probe in kprobes/list."""
    lines = read(mount, CLIENT, "/kprobes/list").decode().splitlines()
    return [line.split(maxsplit=2)[2].rstrip() for line in lines]


def enable(mount: Mount, engine: LinuxEngine, *lines: bytes) -> None:
    """Define the events `lines`, enable all events, and run the optimizer."""
    write(mount, CLIENT, "/kprobe_events", b"\n".join(lines))
    write(mount, CLIENT, "/tracing/events/kprobes/enable", b"1\n")
    settle(engine)


@pytest.mark.parametrize("traced", [b"1", b"0"])
def test_both_kinds_of_hits_record_the_same(clean: Mount, engine: LinuxEngine, traced: bytes) -> None:
    """Hits by a breakpoint and by a jump record equal registers, processor states and call chains.

    With the option stacktrace off, guest code handles the hits by the jump after the first one.
    """
    registers = b" ".join(b"r%d=%%x%d" % (number, number) for number in range(31))
    line = b"p:kprobes/inside vfs_read+48 " + registers + b" sp=%sp pc=%pc state=%pstate $comm\n"
    write(clean, CLIENT, "/tracing/options/stacktrace", traced)
    shown = []
    for allowed in (b"0", b"1"):
        write(clean, CLIENT, OPTIMIZATION, allowed)
        enable(clean, engine, line)
        assert listed(clean) == ["vfs_read+0x30" + "    [OPTIMIZED]" * int(allowed)]
        for _ in range(3):
            file = clean.open(CLIENT, "/scratch/greeting", os.O_RDONLY)
            assert clean.read(CLIENT, file, SIZE, 0) == b"hello\n"
            clean.release(file)
        head = engine.kprobes.table.get(engine.kernel.required("vfs_read") + 48)
        assert head is not None
        assert (head.compiled is not None) == (allowed == b"1" and traced == b"0")
        write(clean, CLIENT, "/tracing/events/enable", b"0\n")
        shown.append([*hits_of(SIZE, records(clean))])
        write(clean, CLIENT, "/tracing/trace", b"")
        clear(clean)
    write(clean, CLIENT, "/tracing/options/stacktrace", b"0")
    assert len(shown[0]) == 3
    assert shown[0] == shown[1]
    assert (" => el0t_64_sync" in shown[0][0]) == (traced == b"1")


def hits_of(size: int, found: list[str]) -> Iterator[list[str]]:
    """Yield, for each read of `size` bytes, its record and call chain among the lines `found` of a trace."""
    for at, text in enumerate(found):
        if f" r2={size:#x} " in text:
            chain = takewhile(lambda text: text.startswith(" => "), found[at + 2 :])
            yield [text.partition("inside:")[2], *chain]


def test_optimization_is_switched(clean: Mount, engine: LinuxEngine) -> None:
    """The jump is removed and written again by debug.kprobes-optimization, kprobes/enabled and the event's
    `enable`.

    Each hit is recorded exactly once while the probe is armed.
    """
    enable(clean, engine, b"p:kprobes/entry vfs_read size=%x2:u64\n")
    file = clean.open(CLIENT, "/scratch/greeting", os.O_RDONLY)
    event = "/tracing/events/kprobes/entry/enable"
    sizes = iter(range(70, 80))
    for path, flag in ((OPTIMIZATION, ""), ("/kprobes/enabled", ""), (event, "[DISABLED]")):
        assert listed(clean) == ["vfs_read+0x0    [OPTIMIZED]"]
        clean.read(CLIENT, file, next(sizes), 0)
        write(clean, CLIENT, path, b"0")
        settle(engine)
        assert listed(clean) == [f"vfs_read+0x0    {flag}".rstrip()]
        clean.read(CLIENT, file, next(sizes), 0)
        write(clean, CLIENT, path, b"1")
        settle(engine)
    clean.release(file)
    found = [int(line.rpartition("size=")[2]) for line in records(clean)]
    assert [size for size in found if 70 <= size < 80] == [70, 71, 72, 74]
    assert counts(clean)["entry"][1] == 0


def test_the_steps_of_patching(clean: Mount, engine: LinuxEngine) -> None:
    """Each change between breakpoint and jump has one intermediate step, with the breakpoint in the text.

    One step is enough, because the jump has the size of a breakpoint.
    """
    text = engine.machine.text
    place = engine.kernel.required("vfs_read")
    original = text.original(place, 4)
    breakpoint_ = engine.components.arch.breakpoint
    write(clean, CLIENT, "/kprobes/stages", b"1")
    enable(clean, engine, b"p:kprobes/entry vfs_read\n")
    stops = []
    for change in (b"1", b"0"):
        write(clean, CLIENT, OPTIMIZATION, change)
        settle(engine)
        stops.append(read(clean, CLIENT, "/kprobes/stages").decode().splitlines()[1].split("  ", 2)[2])
        assert text.current(place, 4) == breakpoint_
        write(clean, CLIENT, "/kprobes/stages", b"next")
        assert read(clean, CLIENT, "/kprobes/stages") == b"1\n"
        is_jump = text.current(place, 4) not in (breakpoint_, original)
        assert is_jump == (change == b"1")
    assert stops == ["breakpoint written; next: jump", "breakpoint written over the jump; next: end"]


def test_aggregated_probes(clean: Mount, engine: LinuxEngine) -> None:
    """The jump of a place calls the handlers of all probes at this place.

    A probe with a post_handler needs the breakpoint.
    """
    hits: Counter[str] = Counter()
    place = engine.kernel.required("vfs_read") + 48

    def probe(name: str, **more: Any) -> Kprobe:
        return Kprobe(addr=place, pre_handler=lambda *_: hits.update((name,)), **more)

    members = [probe("a"), probe("b")]
    last = probe("c", post_handler=lambda *_: hits.update(("post",)))
    modes = []
    for new in (*members, last, None):
        with engine.lock:
            if new is None:
                engine.kprobes.unregister_kprobe(last)
            else:
                engine.kprobes.register_kprobe(new)
        settle(engine)
        with engine.lock:
            modes.append(engine.kprobes.mode(members[0]))
        read(clean, CLIENT, "/scratch/greeting")
    with engine.lock:
        for member in members:
            engine.kprobes.unregister_kprobe(member)
    assert modes == ["optimized", "optimized", "int3", "optimized"]
    assert hits["a"] > hits["b"] > hits["c"] == hits["post"] > 0


def test_returns_from_an_optimized_entry(clean: Mount, engine: LinuxEngine) -> None:
    lines = (b"p:kprobes/entry vfs_read\n", b"r:kprobes/got vfs_read $retval\n")
    enable(clean, engine, *lines)
    assert listed(clean) == ["vfs_read+0x0    [OPTIMIZED]"] * 2
    for _ in range(5):
        assert read(clean, CLIENT, "/scratch/greeting") == b"hello\n"
    found = [line for line in records(clean) if "got: (" in line and line.endswith("arg1=6")]
    assert len(found) == 5
    assert counts(clean)["got"][1] == 0


def test_a_handler_removes_its_own_probe(clean: Mount, engine: LinuxEngine) -> None:
    """A handler can unregister its own probe while the CPU is in the detour, which stays until the CPU has
    left it.
    """
    probe: Kprobe
    kprobes = engine.kprobes
    hits = []

    def remove(*_: object) -> None:
        hits.append(1)
        kprobes.unregister_kprobe(probe)

    probe = Kprobe("vfs_read", offset=48, pre_handler=remove)
    with engine.lock:
        kprobes.register_kprobe(probe)
    settle(engine)
    for _ in range(2):
        assert read(clean, CLIENT, "/scratch/greeting") == b"hello\n"
    assert hits == [1]


def test_a_task_sleeps_behind_a_relocated_call(engine: LinuxEngine) -> None:
    """If a task sleeps in a call from a detour, its stack has the original return address.

    The probe and the detour can therefore be freed during the sleep.
    """
    text = engine.machine.text
    schedule = engine.kernel.required("schedule")
    start = engine.kernel.required("schedule_timeout")
    where = engine.kernel.kallsyms.lookup(start)
    assert where is not None
    code = text.original(start, where.symbol.size)
    calls = [at for at in range(start, start + len(code), 4) if _called(code, start, at) == schedule]
    hits: Counter[int] = Counter()
    probes = [Kprobe(addr=at, pre_handler=lambda probe, _: hits.update((probe.address,))) for at in calls]
    with engine.lock:
        for probe in probes:
            engine.kprobes.register_kprobe(probe)
    settle(engine)
    with engine.lock:
        assert {engine.kprobes.mode(probe) for probe in probes} == {"optimized"}
        engine.guest.idle(2_000_000)
        before = hits.total()
        assert before
        for probe in probes:
            engine.kprobes.unregister_kprobe(probe)
        assert not engine.kprobes.garbage.spans
        engine.guest.idle(2_000_000)
    settle(engine)
    assert hits.total() == before


def test_modules(clean: Mount, engine: LinuxEngine) -> None:
    """A probe in a loaded module has a jump to a detour, which is removed with the module."""
    modules = "/machine/modules"
    enable(clean, engine, b"p:kprobes/sent dummy:dummy_xmit+8\np:kprobes/init dummy:dummy_init_module\n")
    write(clean, CLIENT, modules, b"load dummy\n")
    settle(engine)
    assert "dummy_xmit+0x8  dummy [OPTIMIZED]" in listed(clean)
    write(clean, CLIENT, modules, b"unload dummy\n")


def test_a_core_has_the_jump_and_its_detour(clean: Mount, engine: LinuxEngine) -> None:
    """machine/vmcore has the jump and the detour at their addresses.

    The detour ends with the relocated instruction and a jump back.
    """
    enable(clean, engine, b"p:kprobes/inside vfs_read+48\n")
    place = engine.kernel.required("vfs_read") + 48
    head = engine.kprobes.table.get(place)
    assert head is not None
    assert head.detour is not None
    file = clean.open(CLIENT, "/machine/vmcore", os.O_RDONLY)

    def at(address: int, size: int) -> bytes:
        header = clean.read(CLIENT, file, 1 << 20, 0)
        count = int.from_bytes(header[56:58], "little")
        for number in range(count):
            kind, _, offset, start, _, length = struct.unpack_from("<IIQQQQ", header, 64 + 56 * number)
            if kind == 1 and start <= address < start + length:
                return clean.read(CLIENT, file, size, offset + address - start)
        raise AssertionError(f"{address:#x} is in no segment")

    arch = engine.components.arch
    buffer = head.detour.address
    assert at(place, 4) == arch.relative_jump(place, buffer)
    original = engine.machine.text.original(place, 4)
    assert at(buffer, head.detour.size).endswith(
        original + arch.relative_jump(buffer + head.detour.size - 4, place + 4)
    )
    clean.release(file)


def test_reasons_of_whole_functions(engine: LinuxEngine) -> None:
    """reasons() of a function gives the same reasons as checks of the single instructions."""
    checker = engine.kprobes.probe_checker
    start, end = engine.kernel.text
    symbols = [symbol for symbol in engine.kernel.kallsyms.symbols if start <= symbol.address < end]
    names = (
        "vfs_read",
        "dput",
        "queued_spin_lock_slowpath",
        "__arch_copy_from_user",
        "cpu_switch_to",
        "panic",
    )
    chosen = [symbol for symbol in symbols if symbol.name in names]
    found: Counter[object] = Counter()
    for symbol in (*chosen, *random.Random(2).sample(symbols, 60)):
        expected = {}
        for addr, refused, outcome in checker.check_each_insn(symbol):
            finding = refused or outcome
            expected[addr] = finding.reason if isinstance(finding, Rejection) else None
        assert checker.reasons(symbol) == expected, symbol.name
        found.update(expected.values())
    assert {RejectReason.IN_EXCLUSIVE, RejectReason.HAS_FIXUP, RejectReason.BLACKLISTED} < found.keys()


def test_instructions_of_the_kernel(engine: LinuxEngine) -> None:
    """Each instruction of a random sample of the text has the same effects in place and relocated.

    `python -m stress.linux.relocations` executes all of them.
    """
    start, end = engine.kernel.text
    text = engine.machine.text
    dice = random.Random(1)
    words = {int.from_bytes(text.original(dice.randrange(start, end, 4), 4), "little") for _ in range(900)}
    with mover(1) as moving:
        moved = [word for word in words if may_move(word) and relocation_of(word) is not Relocation.CALL]
        assert len(moved) > 500
        assert not any(map(moving.differs, moved))


def _called(code: bytes, start: int, at: int) -> int | None:
    word = int.from_bytes(code[at - start : at - start + 4], "little")
    offset = (word & 0x3FFFFFF ^ 1 << 25) - (1 << 25)
    return at + 4 * offset & WORD if word >> 26 == 0x25 else None
