"""Helpers that put kprobefs's kprobes into Debian's kernel, in each mode, and a workload that hits the
probes.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import cache
from itertools import islice
from types import CodeType, FrameType
from typing import Any, NamedTuple

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.arch.program.ir import AddToAbsolute
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import LinuxTask
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.guests.linux.table_cache import kernel_from_file
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.kprobes.hit.handling import HitHandling
from emulated_kernel.kprobes.kprobe import CompileHandler, Kprobe
from emulated_kernel.kprobes.profile import (
    DEFAULT,
    PROFILES,
    RISCV_FTRACE_PROFILE,
    RISCV_PROFILE,
    STRATEGIES,
    Profile,
    arm64_profile,
)
from tests.guests.linux import debian_kernel

GUEST_RAM = 128 << 20
IS_RISCV = debian_kernel.META.endswith("-riscv64")
IS_ARM = debian_kernel.META.endswith("-arm64")
_X87 = 0xD8
"""First of the eight opcodes of x87 instructions."""
PLAIN = replace(PROFILES[DEFAULT], ftrace=False, optimizer=False)
MODES = {
    "stepped": PLAIN,
    "boosted": replace(PLAIN, preemption=False),
    "optimized": replace(PLAIN, optimizer=True),
    "extended": replace(PLAIN, optimizer=True, strategies=STRATEGIES),
    "ftrace": PROFILES[DEFAULT],
}
RISCV_MODES = {
    "stepped": replace(PROFILES[RISCV_PROFILE], optimizer=False),
    "optimized": PROFILES[RISCV_PROFILE],
    "extended": replace(PROFILES[RISCV_PROFILE], strategies=STRATEGIES),
    "ftrace": PROFILES[RISCV_FTRACE_PROFILE],
}
ARM_PROFILE = arm64_profile("6.12", "linux-6.12")
ARM_MODES = {
    "stepped": replace(ARM_PROFILE, optimizer=False),
    "optimized": ARM_PROFILE,
    "ftrace": ARM_PROFILE,
}
DEFAULT_MODE = "ftrace"
"""Name of the mode that a mount has without --profile."""
if IS_RISCV:
    MODES, DEFAULT_MODE, PLAIN = RISCV_MODES, "optimized", RISCV_MODES["stepped"]
if IS_ARM:
    MODES, DEFAULT_MODE, PLAIN = ARM_MODES, "optimized", ARM_MODES["stepped"]


@cache
def kernel() -> LinuxKernel:
    return kernel_from_file(str(debian_kernel.image()))


def engine(profile: Profile) -> LinuxEngine:
    made = LinuxEngine(*debian_kernel.with_kernel(), profile)
    pun_space = made.machine.model.layout.pun_space
    if profile.optimizer and pun_space:
        # The guest's page tables lead to the pages of punned jumps from now on, also after a rewind.
        text = made.machine.text
        text.free_text(text.alloc_text(16, pun_space[0]))
    return made


def unprobed_engine() -> LinuxEngine:
    """Return an engine without probes, but with the same memory as an engine with probes.

    The kernel's page tables also map the host's window of code.
    """
    alone = engine(MODES["stepped"])
    alone.machine.text.free_text(alone.machine.text.alloc_text(16))
    return alone


# Where probes are


def boundaries(engine: LinuxEngine, starts: Iterable[int]) -> Iterator[int]:
    """Yield the addresses of the instructions of the functions at `starts`, in order."""
    for address in sorted(starts):
        where = kernel().kallsyms.lookup(address)
        assert where is not None
        code = engine.machine.text.original(address, where.symbol.size)
        yield from engine.components.arch.instruction_boundaries(code, address)


def chosen(engine: LinuxEngine, addresses: Iterable[int]) -> Iterator[int]:
    """Yield the addresses among `addresses` that can be probed, except x87 instructions and landing pads.

    With the optimizer, yield only addresses whose jumps do not overlap.
    """
    verdict, end = engine.kprobes.probe_checker, 0
    has_x87 = engine.components.arch.name == "x86_64"
    for address in addresses:
        # Linux: fxsave stores the address of the last x87 instruction, which would be in the insn slot.
        if (
            (has_x87 and engine.machine.text.original(address, 1)[0] & 0xF8 == _X87)
            or verdict.may_probe(address) is not None
            # A probe of a landing pad is placed after the pad, at the address of the next instruction.
            or _is_pad(engine, address)
        ):
            continue
        if engine.kprobes.optimizer is None:
            yield address
            continue
        region = verdict.optimized_region(address)
        if address >= end and not isinstance(region, Rejection):
            yield address
            end = region.addr + region.length


def _is_pad(engine: LinuxEngine, address: int) -> bool:
    where = engine.kernel.kallsyms.lookup(address)
    return where is not None and engine.kprobes.probe_checker.function_entry(where, address) not in (
        None,
        address,
    )


class GuestCounters:
    """Counters in guest memory, one for each probe. Handlers in guest code increment them at hits."""

    def __init__(self, engine: LinuxEngine, addresses: Sequence[int]) -> None:
        self._machine = engine.machine
        self._start = engine.machine.alloc_pages(8 * len(addresses))
        self._places = {address: self._start + 8 * number for number, address in enumerate(addresses)}

    def program(self, address: int) -> CompileHandler:
        """Return the function that compiles the handler of the probe at `address`."""

        def emit(builder: ProgramBuilder, _way: EntryKind) -> bool:
            builder.emit(AddToAbsolute(self._places[address], 1))
            return True

        return emit

    def hits(self) -> Counter[int]:
        """Return a map for the probes with hits: address -> number of hits."""
        data = self._machine.memory.read(self._start, 8 * len(self._places))
        counts = memoryview(data).cast("Q")
        return Counter({address: count for address, count in zip(self._places, counts, strict=True) if count})


def _compile(engine: LinuxEngine, probes: Iterable[Kprobe]) -> None:
    """Compile the handlers of breakpoints and jumps, before the first hit."""
    routes = engine.kprobes.routes
    for probe in probes:
        head = engine.kprobes.table.valid(probe)
        assert head is not None
        if head.is_patched:
            routes.compile_detour(head)
        elif not head.is_ftrace:
            routes.compile_stub(head)
        assert head.is_ftrace or head.compiled is not None or head.stub is not None, hex(head.address)


def armed(
    engine: LinuxEngine,
    addresses: Sequence[int],
    *,
    may_lack_detours: bool = False,
    counters: GuestCounters | None = None,
) -> tuple[list[Kprobe], Counter[int]]:
    """Register probes in the best mode that the profile allows; return the probes and the count of their
    hits.

    With the optimizer, all probes get jumps. `may_lack_detours`: a probe with a punned jump may keep its
    breakpoint, because other detours may take the few addresses that are possible for its detour.

    `counters`: the handlers are guest code, which counts hits in these counters. The returned count lacks
    these hits.
    """
    hits: Counter[int] = Counter()
    probes = [
        Kprobe(
            addr=address,
            pre_handler=lambda kprobe, _: hits.update((kprobe.address,)),
            program=None if counters is None else counters.program(address),
        )
        for address in addresses
    ]
    with engine.lock:
        for probe in probes:
            engine.kprobes.register_kprobe(probe)
        if engine.kprobes.optimizer is not None:
            engine.kprobes.optimizer.work.flush()
            for probe in unpatched(engine, probes):
                region = engine.kprobes.probe_checker.optimized_region(probe.address)
                head = engine.kprobes.table.valid(probe)
                assert isinstance(region, Region)
                assert head is not None
                lacks_detour = may_lack_detours and region.kept and head.detour is None
                assert lacks_detour, hex(probe.address)
        if counters is not None:
            _compile(engine, probes)
    return probes, hits


def unpatched(engine: LinuxEngine, probes: Iterable[Kprobe]) -> list[Kprobe]:
    """Return the probes that have a breakpoint."""
    table = engine.kprobes.table
    return [probe for probe in probes if not probe.is_ftrace and not table.is_patched(probe)]


def disarmed(engine: LinuxEngine, probes: Iterable[Kprobe]) -> None:
    """Unregister the probes, and check that no hit was missed and the text is the original again."""
    with engine.lock:
        for probe in probes:
            assert (probe.nmissed, probe.failures) == (0, 0), hex(probe.address)
            engine.kprobes.unregister_kprobe(probe)
        if engine.kprobes.optimizer is not None:
            engine.kprobes.optimizer.work.flush()
    assert not engine.machine.text.ledger


# The workload


def workload(engine: LinuxEngine) -> list[Any]:
    """Make system calls of two clients, forks and an exit; return the answers."""
    tasks, calls = engine.tasks, LinuxSyscalls(engine.tasks)
    first = tasks.fork(tasks.init, 4001)
    second = tasks.fork(first, 4002)
    answers: list[Any] = []
    for turn in range(12):
        answers += _files(calls, (first, second)[turn % 2], turn)
    tasks.exit(second)
    return answers


def _files(calls: LinuxSyscalls, client: LinuxTask, turn: int) -> Iterator[Any]:
    path = f"/scratch/file{turn % 3}"
    fd = calls.open(client, path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o640)
    yield calls.write(client, fd, bytes([turn]) * (turn * 700), None)
    size = calls.begin_read(client, fd, 5000, 0, may_block=True)
    yield calls.read_data(client, size, size)
    yield calls.lstat(path).size
    calls.close(client, fd)
    yield sorted(entry.name for entry in calls.listdir("/scratch"))


class Probed(NamedTuple):
    """Results of a workload with probes: what it returned, what the probes recorded, and its memory."""

    answers: list[Any]
    hits: Counter[int]
    """Address -> number of hits."""
    breakpoints: int
    """Number of probes with a breakpoint."""
    native_traps: int
    """Number of traps that did not enter Python."""
    python_calls: Counter[str]
    """Name of a function of emulated_kernel.kprobes.hit -> number of calls during the workload.

    They are counted only if all handlers are guest code: to count them slows down all code in Python.
    """


def probed(
    engine: LinuxEngine,
    addresses: Sequence[int],
    *,
    may_lack_detours: bool = False,
    is_compiled: bool = False,
) -> Probed:
    """Run the workload with probes; armed() explains `may_lack_detours`.

    `is_compiled`: all handlers are guest code.
    """
    counters = GuestCounters(engine, addresses) if is_compiled else None
    probes, hits = armed(engine, addresses, may_lack_detours=may_lack_detours, counters=counters)
    before = engine.machine.hooks.native_traps
    with engine.lock, calls_of_hits() if is_compiled else nullcontext(Counter[str]()) as calls:
        answers = workload(engine)
    native = engine.machine.hooks.native_traps - before
    breakpoints = len(unpatched(engine, probes))
    disarmed(engine, probes)
    if counters is not None:
        hits += counters.hits()
    return Probed(answers, hits, breakpoints, native, calls)


@contextmanager
def calls_of_hits() -> Iterator[Counter[str]]:
    """Count, during the block, the calls of the Python functions that handle breakpoints and the ends of
    single steps.
    """
    calls: Counter[str] = Counter()
    codes = {each.__code__ for each in (HitHandling.emulate, HitHandling.on_step_end, HitHandling.singlestep)}
    makers = (HitHandling.by_breakpoint, HitHandling.by_stub, HitHandling.by_detour)
    codes.update(
        constant
        for maker in makers
        for constant in maker.__code__.co_consts
        if isinstance(constant, CodeType)
    )

    def note(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code in codes:
            calls[frame.f_code.co_qualname] += 1

    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)


def ram(engine: LinuxEngine) -> bytes:
    return engine.tasks.machine.memory.ram[:GUEST_RAM]


def differing(one: bytes, other: bytes) -> list[str]:
    """Return one line for each of the first 20 words that differ: address, word of `one`, word of `other`."""
    pages = (at for at in range(0, GUEST_RAM, 4096) if one[at : at + 4096] != other[at : at + 4096])
    words = (
        at for page in pages for at in range(page, page + 4096, 8) if one[at : at + 8] != other[at : at + 8]
    )
    return [f"{at:#x}: {one[at : at + 8].hex()} {other[at : at + 8].hex()}" for at in islice(words, 20)]
