"""Whole functions under as many probes as possible, in every mode of a hit.

test_functions.py tests steps that end with a second breakpoint. Each mode is tested with another part of the
functions. Probes are on all executed instructions and on a part of the others. With KPROBEFS_WHOLE=1, all
functions and all instructions are tested.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from random import Random

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import Profile, RegisterSaving, Stepper
from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.util.config import MachineConfig
from tests.kprobes.boundaries import Boundary, all_boundaries
from tests.kprobes.conftest import BREAKPOINTS
from tests.kprobes.functions import Outcome, Runner
from tests.kprobes.states import build_arena, counter_cell, generate, writable_memory
from tests.ledger import ledger_mismatches
from tests.sample import fewer, share

SEED = 64
PARTS = 100
REST = 48
SITES = 6
RAM = 24 << 20
STACK_SIZE = 16 << 10
OPTIMIZED = Profile("optimized", ftrace=False)
CALLED = Profile("called", optimizer=False)
WAYS = {
    "boosted": replace(BREAKPOINTS, preemption=False),
    "stepped by TF": replace(BREAKPOINTS, stepper=Stepper.TRAP_FLAG),
    "breakpoints, compiled": BREAKPOINTS,
    "optimized": replace(OPTIMIZED, compiled=False),
    "optimized, live registers": OPTIMIZED,
    "optimized, all registers": replace(OPTIMIZED, saving=RegisterSaving.ALL),
    "called": replace(CALLED, compiled=False),
    "called, live registers": CALLED,
    "called, all registers": replace(CALLED, saving=RegisterSaving.ALL),
}
IN_PYTHON = {"boosted", "stepped by TF"}


@dataclass(frozen=True)
class Call:
    """A call of a function: its registers at the start, the number of executions of each instruction, and its
    outcome without probes.
    """

    start: RegisterSet
    counts: Counter[int]
    plain: Outcome


class Bench:
    """A kernel, calls of its functions, and probes that count."""

    def __init__(self, kernel: Kernel, way: str) -> None:
        self.kernel, self.way = kernel, way
        machine, rng = kernel.machine, Random(SEED)
        boundaries = all_boundaries(kernel.image)
        self.boundaries = [b for b in boundaries if b.refusal is None]
        self.hits: Counter[int] = Counter()
        arena = build_arena(machine, rng, text=False)
        self.cell, self.cell_offset = counter_cell(machine)
        """Address of a cell for counts, which the guest does not use, and its offset from the CPU's base."""
        self.top = top = machine.calls.stack_top
        self.pad = machine.model.layout.host_text
        machine.memory.write_word(top, self.pad)
        self._runner = Runner(machine, writable_memory(machine, arena), boundaries)
        entries = list({b.function: b.addr for b in reversed(self.boundaries)}.values())
        # Calls that switch tasks are left out, because probes leave values on the stacks of the other tasks.
        switch = kernel.image.kallsyms.lookup_name("__schedule")
        part = 2 * list(WAYS).index(way) + (machine.model.bits == 32)
        called = [generate(arena, rng, entry)._replace(sp=top) for entry in share(entries, part, PARTS)]
        self.calls = [
            Call(start, counts, plain)
            for start, counts in self._runner.counted(called)
            if switch not in counts
            and not self._runner.loses_flags(counts)
            # A cold part that is called may leave the stack, where no memory is mapped for a probe's frame.
            and (plain := self.run(start)).end.sp <= top + machine.model.word_size
        ]
        assert len(self.calls) > 0.6 * len(called)
        self._part = part
        self._executed = {addr for call in self.calls for addr in call.counts}
        rest = {b.addr for b in share(self.boundaries, part, REST)}
        self.probed = [b for b in self.boundaries if b.addr in self._executed or b.addr in rest]

    def run(self, start: RegisterSet) -> Outcome:
        """Call a function and return the outcome, without the changes of free stack memory."""
        outcome = self._runner.call(start)
        free = range(self.top - STACK_SIZE, self.top)
        changes = {at: piece for at, piece in outcome.changes.items() if at not in free}
        return Outcome(outcome.trap, outcome.end, changes)

    def count(self) -> int:
        return self.hits.total() + self.kernel.machine.memory.read_u64(self.cell)

    def probes(self) -> list[Kprobe]:
        program = None if self.way in IN_PYTHON else self._emit
        return [Kprobe(addr=addr, pre_handler=self._hit, program=program) for addr in self._places()]

    def _places(self) -> list[int]:
        kernel = self.kernel
        if kernel.kprobes.sites is not None:
            sites = [b.addr for b in self.boundaries if b.addr in kernel.image.mcount]
            rest = {*share(sites, self._part, SITES)}
            return [site for site in sites if site in self._executed or site in rest]
        if kernel.kprobes.optimizer is not None:
            return list(_disjoint(self.probed, kernel))
        return [b.addr for b in self.probed]

    def _hit(self, kprobe: Kprobe, _regs: object) -> None:
        self.hits[kprobe.address] += 1

    def _emit(self, builder: ProgramBuilder, _way: EntryKind) -> bool:
        noise = (ir.SetImmediate(vreg, 0x1234_5678 << vreg) for vreg in range(ir.NR_VREGS))
        builder.emit(*noise, ir.Compute(ir.Arithmetic.SUB, 0, 1), ir.AddToPerCpu(self.cell_offset, 1))
        return True

    def is_as(self, call: Call, outcome: Outcome) -> bool:
        """Return True if the outcome of a call with probes is that of the call without probes.

        A fault may happen in the copy of an instruction. Registers that are dead there may differ, and so
        only the kind of the fault is compared.
        """
        if call.plain.trap.address != self.pad + 1:
            return _kind(outcome) == _kind(call.plain)
        return outcome == call.plain


def _kind(outcome: Outcome) -> tuple[object, ...]:
    trap = outcome.trap
    return trap.kind, trap.vector, trap.error_code, trap.cr2, trap.number


def _disjoint(boundaries: list[Boundary], kernel: Kernel) -> Iterator[int]:
    """Yield half of the places that can have a jump at the same time."""
    assert kernel.kprobes.optimizer is not None
    rng, free = Random(SEED), 0
    for boundary in boundaries:
        if boundary.addr < free or rng.random() < 0.5:
            continue
        region = kernel.kprobes.probe_checker.optimized_region(boundary.addr)
        if isinstance(region, Region):
            yield boundary.addr
            free = region.end


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
@pytest.mark.parametrize("way", WAYS)
def test_functions_end_as_without_probes(way: str, arch: str) -> None:
    with Kernel(MachineConfig(arch=arch, ram_size=RAM), profile=WAYS[way]) as kernel:
        bench = Bench(kernel, way)
        probes = bench.probes()
        assert len(probes) > fewer(500, 3)
        armed = {probe.addr for probe in probes}
        kernel.register_kprobes(probes)
        if kernel.kprobes.optimizer is not None:
            kernel.kprobes.optimizer.flush()
            assert {kernel.kprobes.mode(probe) for probe in probes} == {"optimized"}
        # In the second round, handlers run that the first round has compiled.
        for call in bench.calls * 2:
            before = bench.count()
            outcome = bench.run(call.start)
            assert bench.is_as(call, outcome), f"{call.start.ip:#x}: {outcome} instead of {call.plain}"
            expected = sum(count for addr, count in call.counts.items() if addr in armed)
            assert bench.count() - before == expected
        assert kernel.kprobes.compiler.made > 0 or way in IN_PYTHON or not kernel.kprobes.profile.compiled
        kernel.unregister_kprobes(probes)
        if kernel.kprobes.optimizer is not None:
            kernel.kprobes.optimizer.work.flush()
        assert all(probe.nmissed == 0 for probe in probes)
        assert kernel.machine.text.ledger == {}
        assert ledger_mismatches(kernel.machine.text) == []
