"""A call that guest code hooks ends as an unhooked call, whether guest code or Python handles its return."""

from __future__ import annotations

from dataclasses import replace

import pytest

from emulated_kernel.arch.program import ir
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kprobes.kinds.fprobe import Fprobe
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.profile import Profile, RegisterSaving, TrampolineForm
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from emulated_kernel.machine.guest_calls import map_stack
from emulated_kernel.util.abi import PAGE_SIZE
from tests.kprobes.functions import Outcome, Runner
from tests.kprobes.return_hook.test_transparency import (
    Bench,
    benches,
    changes_noticed,
    hook_all,
    ways_with_stacks,
)
from tests.kprobes.states import writable_memory
from tests.ledger import ledger_mismatches
from tests.sample import share

CALLED = Profile("called", optimizer=False)
BREAKPOINTS = Profile("breakpoints", ftrace=False, optimizer=False, trampoline=TrampolineForm.BREAKPOINT)
OPTIMIZED = Profile("optimized", ftrace=False)
WAYS = {
    "called": CALLED,
    "called, all registers": replace(CALLED, saving=RegisterSaving.ALL),
    "breakpoints": BREAKPOINTS,
    "optimized": OPTIMIZED,
    "optimized, all registers": replace(OPTIMIZED, saving=RegisterSaving.ALL),
}
STACKS = list(SHADOW_STACKS)


CASES = ways_with_stacks(WAYS)
FPROBE_CASES = [(way, stack) for way, stack in CASES if WAYS[way].ftrace]


def _is_same_end(bench: Bench, plain: Outcome, hooked: Outcome, trampolines: set[int]) -> bool:
    """Return True if a hooked call ends as the plain one.

    A function that faults may fault in the copy of an instruction, and its dead registers may differ. If only
    live registers are saved, a function that returns is compared by the registers of the calling convention.
    """
    kernel, trap = bench.kernel, plain.trap
    if trap.address != kernel.machine.model.layout.host_text + 1:
        seen = hooked.trap
        return (trap.kind, trap.vector, trap.number) == (seen.kind, seen.vector, seen.number)
    names = set(plain.end._fields)
    if not kernel.kprobes.compiler.saves_all:
        assert kernel.arch.returns is not None
        names = {*kernel.arch.returns.live.registers, "sp", "ip"}
    return all(getattr(hooked.end, name) in (getattr(plain.end, name), *trampolines) for name in names)


def _counting(bench: Bench, cell: int, entry: int) -> Kretprobe:
    """Return a kretprobe on the function at `entry` that counts returns in `cell`.

    The probe's program also overwrites all registers that a program may overwrite; for every third function,
    the handler is in Python instead.
    """

    def emit(builder: ProgramBuilder, way: EntryKind) -> bool:
        assert way is EntryKind.RETURN
        noise = (ir.SetImmediate(vreg, 0x1234_5678 << vreg) for vreg in range(ir.NR_VREGS))
        builder.emit(*noise, ir.Compute(ir.Arithmetic.SUB, 0, 1), ir.AddToAbsolute(cell, 1))
        return True

    def count(*_: object) -> None:
        memory = bench.kernel.machine.memory
        memory.write_word(cell, memory.read_u64(cell) + 1)

    return Kretprobe(addr=entry, handler=count, return_program=None if entry % 3 == 0 else emit)


def _run_all(bench: Bench, runner: Runner, entries: dict[int, int]) -> None:
    """Run all calls twice, compare each with the plain call, and add the calls of functions to `entries`.

    In the second round, handlers compiled in the first one are used.
    """
    kernel, hooks = bench.kernel, bench.kernel.kretprobes.hooks
    machine = kernel.machine
    own = [kernel.image.abi[f"host_{kind}return_trampoline"] for kind in ("", "native_")]
    for start, counts, plain in bench.calls * 2:
        end = runner.call(start)
        trampolines = {hooks.trampoline.address, hooks.trampoline.native}
        assert _is_same_end(bench, plain, end, trampolines), f"{start.ip:#x}: {plain} became {end}"
        if plain.trap.address == machine.model.layout.host_text + 1:
            assert changes_noticed(start, plain, end, own) == []
        for address in counts.keys() & entries.keys():
            entries[address] += counts[address]


@pytest.mark.parametrize(("way", "stack"), share(CASES, 0, 6))
def test_functions_hooked_by_guest_code_end_as_unhooked_ones(way: str, stack: str) -> None:
    """All functions are hooked; each case calls another part of the functions."""
    with benches(WAYS[way], CASES.index((way, stack)), len(CASES)) as bench:
        _end_as_unhooked(bench, stack)


def _end_as_unhooked(bench: Bench, stack: str) -> None:
    kernel, hooks = bench.kernel, bench.kernel.kretprobes.hooks
    machine, memory = kernel.machine, kernel.machine.memory
    hooks.select_return_hook(stack)
    cell = map_stack(memory, machine.model, 8 + STACKS.index(stack), PAGE_SIZE) - PAGE_SIZE
    hooked = hook_all(kernel, bench.boundaries, lambda entry: _counting(bench, cell, entry))
    assert len(hooked) > 500
    runner = Runner(machine, writable_memory(machine, bench.arena), bench.boundaries)
    entries = dict.fromkeys(hooked, 0)
    _run_all(bench, runner, entries)
    for address, rp in hooked.items():
        assert rp.hook is not None
        assert rp.returns + rp.nmissed + rp.hook.flushed == entries[address], hex(address)
        assert rp.hook.active == 0
    assert memory.read_u64(cell) == sum(rp.returns for rp in hooked.values())
    if hooks.native is not None:
        assert sum(rp.hook is not None and rp.hook.code is not None for rp in hooked.values()) > 20
    kernel.unregister_kretprobes(list(hooked.values()))
    if kernel.kprobes.optimizer is not None:
        kernel.kprobes.optimizer.work.flush()
    assert machine.text.ledger == {}
    assert ledger_mismatches(machine.text) == []


@pytest.mark.parametrize(("way", "stack"), share(FPROBE_CASES, 2, 3))
def test_functions_of_one_fprobe_end_as_unhooked_ones(way: str, stack: str) -> None:
    """All functions are hooked by one fprobe, whose programs overwrite as many registers as possible."""
    with benches(WAYS[way], FPROBE_CASES.index((way, stack)), len(FPROBE_CASES)) as bench:
        _end_as_unhooked_by_an_fprobe(bench, stack)


def _end_as_unhooked_by_an_fprobe(bench: Bench, stack: str) -> None:
    kernel, hooks = bench.kernel, bench.kernel.kretprobes.hooks
    machine, memory = kernel.machine, kernel.machine.memory
    hooks.select_return_hook(stack)
    entered = map_stack(memory, machine.model, 16 + STACKS.index(stack), PAGE_SIZE) - PAGE_SIZE
    exited = entered + 8

    def note(cell: int) -> None:
        memory.write_word(cell, memory.read_u64(cell) + 1)

    def emit(builder: ProgramBuilder, way: EntryKind) -> bool:
        noise = (ir.SetImmediate(vreg, 0x1234_5678 << vreg) for vreg in range(ir.NR_VREGS))
        builder.emit(*noise, ir.Compute(ir.Arithmetic.SUB, 0, 1))
        builder.emit(ir.AddToAbsolute(exited if way is EntryKind.RETURN else entered, 1))
        return True

    fp = Fprobe(
        "*",
        entry_handler=lambda *_: note(entered),
        exit_handler=lambda *_: note(exited),
        entry_program=emit,
        exit_program=emit,
    )
    kernel.register_fprobe(fp)
    runner = Runner(machine, writable_memory(machine, bench.arena), bench.boundaries)
    entries = dict.fromkeys(fp.functions, 0)
    assert len(entries) > 500
    _run_all(bench, runner, entries)
    assert fp.hook is not None
    assert fp.hook.code is not None
    assert memory.read_u64(exited) == fp.hook.returned
    assert memory.read_u64(entered) == fp.hook.returned + fp.hook.flushed
    assert fp.hook.returned + fp.hook.flushed + fp.nmissed == sum(entries.values())
    kernel.unregister_fprobe(fp)
    assert machine.text.ledger == {}
    assert ledger_mismatches(machine.text) == []
