"""Transparency of probes: registers, flags, memory and faults of every instruction of the image.

A part of the instructions is tested; KPROBEFS_WHOLE=1 takes all. KPROBEFS_STATES=N runs each instruction from
N register states instead of four.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.util.config import MachineConfig
from tests.kprobes.boundaries import ERRNOS, Boundary, all_boundaries, verdict
from tests.kprobes.conftest import BREAKPOINTS
from tests.kprobes.states import Arena, build_arena, generate, image_and_arena, writable_memory
from tests.kprobes.transparency import Effect, Stepper, differences
from tests.ledger import ledger_mismatches
from tests.sample import share

STATES = int(os.environ.get("KPROBEFS_STATES", "4"))
SEED = 61
RAM = 23 << 20
ARCHS = ("x86_64", "i386")
PARTS = 64


@pytest.fixture(scope="module", params=ARCHS)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(MachineConfig(arch=request.param, ram_size=RAM), profile=BREAKPOINTS) as kernel:
        yield kernel


@pytest.fixture(scope="module")
def boundaries(kernel: Kernel) -> list[Boundary]:
    return all_boundaries(kernel.image)


@pytest.fixture(scope="module")
def arena(kernel: Kernel) -> Arena:
    return build_arena(kernel.machine, Random(SEED))


def test_every_boundary_is_probeable_or_refused_by_a_rule(kernel: Kernel, boundaries: list[Boundary]) -> None:
    (text,) = kernel.image.text_ranges
    assert sum(b.size for b in boundaries) == text.end - text.start
    asked = share(boundaries, ARCHS.index(kernel.image.arch), PARTS)
    wrong = [b for b in asked if verdict(kernel.kprobes, b.addr) != ERRNOS.get(b.refusal or "", 0)]
    assert wrong == []
    counts = Counter(b.refusal for b in boundaries)
    assert counts.keys() == {None, *ERRNOS}
    assert counts[None] > 0.9 * (len(boundaries) - counts["breakpoint"])
    assert counts[None] > 10_000
    assert len({b.function for b in boundaries if b.refusal is None}) > 400


def _states(kernel: Kernel) -> int:
    """Return the number of states of an instruction; only half as many in 32 bits, where each run compares
    all memory.
    """
    return STATES if kernel.machine.model.bits == 64 else (STATES + 1) // 2


def _noticed(stepper: Stepper, kernel: Kernel, arena: Arena, boundary: Boundary) -> list[str]:
    """Return descriptions of the differences at one boundary, over all states."""
    rng = Random(SEED * boundary.addr)
    starts = [generate(arena, rng, boundary.addr, repeats=boundary.repeats) for _ in range(_states(kernel))]
    unprobed = [_unprobed(stepper, boundary, start) for start in starts]
    probe = stepper.probe(boundary.addr)
    kernel.kprobes.register_kprobe(probe)
    probed = [stepper.probed(start) for start in starts]
    kernel.kprobes.unregister_kprobe(probe)
    assert kernel.kprobes.hits.may_interrupt(), f"{boundary}: the hit has not ended"
    found = [differences(a, b) for a, b in zip(unprobed, probed, strict=True)]
    native = _natively(stepper, kernel, boundary, starts, unprobed)
    found += [differences(a, b) for a, b in zip(unprobed, native, strict=True)] if native else []
    starts *= 2
    # From some states, the code reads the clock, and so even two runs without a probe differ.
    return [
        f"{boundary}, state {i}: {d}"
        for i, d in enumerate(found)
        if d and not differences(*(_unprobed(stepper, boundary, starts[i]) for _ in range(2)))
    ]


def _natively(
    stepper: Stepper, kernel: Kernel, boundary: Boundary, starts: list[RegisterSet], unprobed: list[Effect]
) -> list[Effect]:
    """Return the effects of hits whose handler is guest code.

    Return an empty list if Python takes part in the hits, or if the host has no native traps.

    An emulated instruction is relocated to the end of the handler, so that its hit is one trap.
    """
    probe = Kprobe(addr=boundary.addr, pre_handler=lambda *_: None, program=lambda _builder, _way: True)
    hooks = kernel.machine.hooks
    if kernel.machine.in_clock_loop(boundary.addr):
        return []
    kernel.kprobes.register_kprobe(probe)
    try:
        head = kernel.kprobes.table.valid(probe)
        assert head is not None
        assert head.insn is not None
        if not kernel.kprobes.routes.compile_stub(head) or not hooks.is_native:
            return []
        assert head.stub is not None
        native = hooks.native_traps
        if head.insn.slot is not None:
            effects = [stepper.up_to(start, boundary.addr + boundary.size) for start in starts]
            faults = sum(effect.fault is not None for effect in effects)
            assert hooks.native_traps - native == 2 * len(starts) - faults, f"{boundary}: Python was called"
            return effects
        assert head.stub.region is not None, f"{boundary}: Python emulates it"
        effects = [stepper.led_to(start, effect) for start, effect in zip(starts, unprobed, strict=True)]
        assert hooks.native_traps - native == len(starts), f"{boundary}: Python was called"
        return effects
    finally:
        kernel.kprobes.unregister_kprobe(probe)


def _unprobed(stepper: Stepper, boundary: Boundary, start: RegisterSet) -> Effect:
    if boundary.hides_trap:
        return stepper.up_to(start, boundary.addr + boundary.size)
    return stepper.unprobed(start).without_trap_flag()


def test_no_probe_is_noticed_by_its_instruction(
    kernel: Kernel, boundaries: list[Boundary], arena: Arena
) -> None:
    machine = kernel.machine
    stepper = Stepper(machine, image_and_arena(machine, arena))
    everything = writable_memory(machine, arena)
    part = ARCHS.index(kernel.image.arch)
    common, rare = ([b for b in boundaries if b.refusal is None and b.raises is r] for r in (False, True))
    probeable = [*share(common, part, PARTS), *rare]
    noticed = [line for b in probeable for line in _noticed(stepper, kernel, arena, b)]
    assert noticed == []
    each, native = _states(kernel) * len(probeable), machine.hooks.native_traps
    assert 2 * each <= stepper.runs < 3 * each + 100
    assert native > each or not machine.hooks.is_native
    vectors = {fault.vector for fault in stepper.faults}
    wanted = {0, 6, 14} if kernel.machine.model.bits == 32 else {0, 6, 13, 14}
    assert wanted <= vectors, "the states miss some kind of fault"
    assert {fault.error_code for fault in stepper.faults if fault.vector == 14} == {0, 2, 3}
    assert everything.changes() == {}
    assert machine.text.ledger == {}
    assert ledger_mismatches(machine.text) == []
    assert kernel.kprobes.slots.used == 0
