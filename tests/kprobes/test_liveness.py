"""Noise in the registers that are dead by the liveness analysis, at every instruction, changes no result.

A part of the functions is called, with probes at a part of the instructions. With KPROBEFS_WHOLE=1, all
functions and instructions are tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import pytest

from emulated_kernel.arch.analysis.detour_region import LiveRegisters
from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.ir import Arithmetic, Condition, Label, Program
from emulated_kernel.arch.x86.emulate import REGISTER_NAMES
from emulated_kernel.arch.x86.liveness import ALL_LIVE
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.machine.traps.trap import TrapKind
from emulated_kernel.util.config import MachineConfig
from tests.arch.placed import detouring
from tests.kprobes.boundaries import all_boundaries
from tests.kprobes.conftest import BREAKPOINTS
from tests.kprobes.functions import Outcome, Runner
from tests.kprobes.states import ARITHMETIC_FLAGS, build_arena, counter_cell, generate, writable_memory
from tests.ledger import ledger_mismatches
from tests.sample import WHOLE, fewer, share

SEED = 4
PARTS = 12
PROBED = 5
"""One of this many instructions has a probe."""
SKIPPED = 0.5 if WHOLE else 0.8
"""Share, from 0 to 1, of the places for jumps that get no jump."""
MAX_HITS = 5000
"""Maximum number of hits of a call. A call with more hits is cut off and not compared."""
STACK_SIZE = 16 << 10


class Calls:
    """Calls of all functions that return, one for each function, with their outcomes without probes."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        boundaries = all_boundaries(kernel.image)
        self.boundaries = [b for b in boundaries if b.refusal is None]
        self.arch = kernel.arch
        self.names = {name for name in self.arch.pt_regs if name in REGISTER_NAMES}
        self.verdict = self.arch.probe_checker(kernel.image, self.arch.strategies["optprobe"], ftrace=False)
        machine, rng = kernel.machine, Random(SEED)
        self.pad = machine.model.layout.host_text
        self.counter, self.counter_offset = counter_cell(machine)
        """Address of a cell for counts, which the guest does not use, and its offset from the CPU's base."""
        self.top = top = machine.calls.stack_top
        arena = build_arena(machine, rng, text=False)
        machine.memory.write_word(top, self.pad)
        self._runner = Runner(machine, writable_memory(machine, arena), boundaries)
        entries = {b.function: b.addr for b in reversed(self.boundaries)}
        starts = [generate(arena, rng, entry)._replace(sp=top) for entry in entries.values()]
        self._returned: list[tuple[RegisterSet, Outcome]] = []
        called = share(starts, machine.model.bits // 32, PARTS)
        with self._switches() as switches:
            for start in called:
                switches.clear()
                end = self._run(start)
                # Calls that fault or switch tasks are left out: no caller sees the registers at a fault,
                # and no task reads the values that are left on the stacks of other tasks.
                if end.trap.address == self.pad + 1 and not switches:
                    self._returned.append((start, end))
        assert len(self._returned) > 0.3 * len(called)

    @contextmanager
    def _switches(self) -> Iterator[list[int]]:
        """Yield a list that gets an item at each task switch."""
        found: list[int] = []
        probe = Kprobe(symbol_name="__schedule", pre_handler=lambda *_: found.append(1))
        self.kernel.register_kprobe(probe)
        yield found
        self.kernel.unregister_kprobe(probe)

    def _run(self, start: RegisterSet) -> Outcome:
        """Call a function and return the outcome, without the changes of the stack."""
        outcome = self._runner.call(start)
        stack = range(self.top - STACK_SIZE, self.top)
        changes = {at: bytes_ for at, bytes_ in outcome.changes.items() if at not in stack}
        return Outcome(outcome.trap, outcome.end, changes)

    def differing(self, cut_off: Callable[[], bool]) -> list[RegisterSet]:
        """Return the calls whose outcome differs from that without probes.

        Leave out calls for which `cut_off` returns True, and calls that take too long.
        """
        finished = 0
        found = []
        for start, expected in self._returned:
            outcome = self._run(start)
            if not cut_off() and outcome.trap.kind is not TrapKind.BUDGET:
                finished += 1
                if outcome != expected:
                    found.append(start)
        assert finished > 0.9 * len(self._returned)
        return found

    def unexplained(self, calls: list[RegisterSet]) -> list[str]:
        """Return the entries of those calls whose difference has no known cause.

        Known causes are calls that read text, in which breakpoints and jumps can be read as on Linux, and
        flags that the emulator loses.
        """
        runner = self._runner
        return [hex(start.ip) for start, counts in runner.counted(calls) if not runner.loses_flags(counts)]


@pytest.fixture(scope="module", params=["x86_64", "i386"])
def calls(request: pytest.FixtureRequest) -> Iterator[Calls]:
    config = MachineConfig(arch=request.param, ram_size=24 << 20, run_budget=0.1)
    with Kernel(config, profile=BREAKPOINTS) as kernel:
        yield Calls(kernel)


class Overwriting:
    """Probes that write noise into dead registers."""

    def __init__(self, names: set[str], pad: int) -> None:
        self._names = names
        self._pad = pad
        self._rng = Random(SEED)
        self.done: Counter[str] = Counter()
        self._left = MAX_HITS

    def probe(self, addr: int, live: LiveRegisters) -> Kprobe:
        dead = sorted(self._names - live.registers)

        def overwrite(_kprobe: Kprobe, regs: Any) -> bool:
            for name in dead:
                setattr(regs, name, getattr(regs, name) ^ self._rng.getrandbits(32))
                self.done[name] += 1
            if not live.flags:
                regs.flags ^= self._rng.getrandbits(12) & ARITHMETIC_FLAGS
                self.done["flags"] += 1
            self._left -= 1
            if self._left < 0:
                regs.ip = self._pad
            return self._left < 0

        return Kprobe(addr=addr, pre_handler=overwrite)

    def cut_off(self) -> bool:
        """Return True if the last call was cut off after too many hits, and begin to count for a new call."""
        left, self._left = self._left, MAX_HITS
        return left < 0


def test_what_is_dead_may_be_overwritten(calls: Calls) -> None:
    overwriting = Overwriting(calls.names, calls.pad)
    live_at = calls.verdict.live_at
    # Registering and unregistering a probe takes longer than its hits.
    boundaries = share(calls.boundaries, calls.arch.bits // 32, PROBED)
    probes = [
        overwriting.probe(boundary.addr, live)
        for boundary in boundaries
        if (live := live_at(boundary.addr)) != ALL_LIVE
    ]
    assert len(probes) > len(boundaries) / 3
    calls.kernel.register_kprobes(probes)
    found = calls.differing(overwriting.cut_off)
    calls.kernel.unregister_kprobes(probes)
    assert calls.unexplained(found) == []
    assert overwriting.done["flags"] > 1000
    assert overwriting.done.keys() == {*calls.names, "flags"} - {"sp"}


def greedy(counter: int, rng: Random) -> Program:
    """Return a program that counts, and overwrites as many registers as a program can."""
    noise = [ir.SetImmediate(vreg, rng.getrandbits(64)) for vreg in rng.sample(range(6), rng.randint(1, 6))]
    vreg, label = noise[0].dst, Label(0)
    return (
        *noise,
        ir.Compute(Arithmetic.XOR, vreg, noise[-1].dst),
        ir.BranchImmediate(Condition.EQ, vreg, 1, label),
        ir.AddToPerCpu(counter, 1),
        ir.Place(label),
    )


@pytest.mark.parametrize("saves_all", [False, True])
def test_compiled_detours_are_transparent(calls: Calls, saves_all: bool) -> None:
    """Many jumps at once to detours with compiled handlers change no result."""
    kernel, arch, rng = calls.kernel, calls.arch, Random(SEED)
    text = kernel.machine.text
    buffers, pokes = [], []
    free = 0
    for boundary in calls.boundaries:
        addr = boundary.addr
        if addr < free or rng.random() < SKIPPED:
            continue
        region = calls.verdict.optimized_region(addr)
        if isinstance(region, Rejection):
            continue
        free = region.end
        live = None if saves_all else calls.verdict.live_at(addr)
        handler = arch.handler_code(greedy(calls.counter_offset, rng), addr, live)
        buffers.append(text.alloc_text(len(handler.code) + arch.max_copied))
        detour = detouring(arch, handler, buffers[-1], region)
        assert len(detour.code) <= len(handler.code) + arch.max_copied
        pokes += [(buffers[-1], detour.code), (addr, arch.relative_jump(addr, buffers[-1] + detour.entry))]
    assert len(buffers) > fewer(1000, 3)
    text.poke_batch(pokes)
    found = calls.differing(lambda: False)
    hits = kernel.machine.memory.read_u64(calls.counter)
    text.poke_batch([(at, text.original(at, arch.jump_size)) for at, data in pokes[1::2]])
    for buffer in buffers:
        text.free_text(buffer)
    assert ledger_mismatches(text) == []
    assert calls.unexplained(found) == []
    assert hits > 1000
