"""Deviations of Unicorn from a riscv64 CPU. For each deviation, a function finds or checks it at start."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable

from emulated_kernel.machine.cpu.registers import Regs
from emulated_kernel.machine.cpu.riscv import (
    CAUSE_FETCH_FAULT,
    CAUSE_ILLEGAL,
    CAUSE_LOAD_FAULT,
    CAUSE_STORE_FAULT,
    EBREAK,
    SCAUSE,
    SEPC,
    SR_SIE,
    SR_SPIE,
    SR_SPP,
    STVAL,
)
from emulated_kernel.machine.interrupts.exceptions import NoExceptionState
from emulated_kernel.machine.interrupts.riscv import RiscvTrapHooks
from emulated_kernel.machine.quirks.harness import (
    HANDLE_SIZE,
    Bench,
    SelfTest,
    check_changed_code_runs,
    check_halt_ends_run,
    context_words,
    find_cpu_state,
    found,
    mark_registers,
    own_memory,
    run_checks,
)
from emulated_kernel.machine.quirks.stops import stop_between_blocks
from emulated_kernel.machine.traps.trap import HardwareError, Trap
from emulated_kernel.machine.unicorn_engine import Engine
from emulated_kernel.util.abi import Vector

_LOAD = bytes.fromhex("03350500")  # ld a0, 0(a0)
_STORE = bytes.fromhex("2330b500")  # sd a1, 0(a0)
_JUMP = bytes.fromhex("67000500")  # jr a0
_NOP = bytes.fromhex("13000000")
_NEXT = bytes.fromhex("6f004000")  # j .+4
_ONE = bytes.fromhex("13051000")  # li a0, 1
_TWO = bytes.fromhex("13052000")  # li a0, 2
_ILLEGAL = bytes(4)
_SRET = bytes.fromhex("73002010")
_READ_TRAP_REGISTERS = bytes.fromhex("73251014f325201473263014")  # csrr a0, sepc; a1, scause; a2, stval
_UC_ERR_EXCEPTION = 21


class LiveBadAddress:
    """Reads the address of the last page fault directly from Unicorn's CPU structure."""

    def __init__(self, address: int) -> None:
        self._cell = memoryview(ctypes.c_uint64.from_address(address)).cast("B").cast("Q")

    def take(self) -> int:
        """Return the address of the last page fault, which Unicorn doesn't store in stval."""
        return self._cell[0]


class ContextBadAddress:
    """Reads the address of the last page fault from a saved context, by API calls only."""

    def __init__(self, engine: Engine, offset: int) -> None:
        self._engine = engine
        context = engine.context_alloc()
        self._context = context
        assert context.value is not None
        self._cell = ctypes.c_uint64.from_address(context.value + offset)

    def take(self) -> int:
        """Save a context, and return the address of the last page fault from it."""
        self._engine.context_save(self._context)
        return self._cell.value


def find_bad_address(bench: Bench) -> tuple[int, int] | None:
    """Return the offsets, in bytes, of two fields in a saved context of Unicorn.

    The fields are the first register, and the address of the last page fault. Return None if they are not
    found.
    """
    engine = bench.engine
    clean = engine.context_alloc()
    context = engine.context_alloc()
    pattern = mark_registers(engine, bench.cpu)
    first = context_words(engine, clean, "Q").tobytes().find(pattern)
    left = None
    for _ in range(2):
        address = int.from_bytes(os.urandom(4), "little") << 3
        engine.context_restore(clean)
        bench.run(_LOAD, a0=address, t0=0)
        # The register with the address must not match.
        bench.regs.set("a0", 0)
        holding = {at for at, word in enumerate(context_words(engine, context, "Q")) if word == address}
        left = holding if left is None else left & holding
    engine.context_restore(clean)
    if first < 0 or not left or len(left) != 1:
        return None
    return first, left.pop() * 8


def find_error_cell(bench: Bench) -> int | None:
    """Return the address of the error field in Unicorn's handle that an ebreak sets; None if it isn't found.

    The search is done in a hook, because the error is cleared at the end of the run.
    """
    seen: list[memoryview] = []

    def look(_trap: Trap, _regs: Regs) -> bool:
        handle = own_memory(bench.engine.address, HANDLE_SIZE)
        seen.append(memoryview(handle[: len(handle) & ~3]).cast("I"))
        return False

    bench.hooks.fault_hooks.append(look)
    try:
        for code in (EBREAK, _ILLEGAL) * 2:
            bench.run(code)
    finally:
        bench.hooks.fault_hooks.remove(look)
    expected = (_UC_ERR_EXCEPTION, 0) * 2
    places = [at for at, values in enumerate(zip(*seen, strict=True)) if values == expected]
    return bench.engine.address + places[0] * 4 if len(places) == 1 else None


def check_breakpoints_in_a_row(bench: Bench) -> None:
    """Check that after a handled ebreak the guest continues, faults are reported, and no error is left."""
    size = len(bench.cpu.filler)
    met = []
    places = [bench.va + at * size for at in range(3)]
    for place in places:
        bench.hooks.breakpoints[place] = lambda regs: met.append(regs.ip)
    try:
        bench.run(bench.cpu.filler * 3 + _ONE)
        end = bench.regs.get("a0")
        error = bench.error
        bench.run(bench.cpu.filler * 3 + _LOAD, a0=0x1000)
    finally:
        for place in places:
            del bench.hooks.breakpoints[place]
    if met != [place + size for place in places] * 2 or end != 1 or error:
        raise HardwareError(f"after {len(met)} of 6 breakpoints a0 is {end}, error {error}")
    if [(trap.vector, trap.address) for trap in bench.traps] != [(Vector.PAGE_FAULT, places[-1] + size)]:
        raise HardwareError(f"a fault after a breakpoint arrived as {[str(trap) for trap in bench.traps]}")


def check_faults(bench: Bench) -> None:
    """Check that exceptions are reported with the right cause, instruction pointer and faulting address.

    Unicorn: the ip that it reports itself is four bytes after the start of the instruction.
    """
    unmapped = 0x1000
    text = bench.cpu.layout.host_text
    for code, address, cause, place in (
        (_LOAD, unmapped, CAUSE_LOAD_FAULT, bench.va),
        (_STORE, text, CAUSE_STORE_FAULT, bench.va),
        (_JUMP, unmapped, CAUSE_FETCH_FAULT, unmapped),
        (_ILLEGAL, 0, CAUSE_ILLEGAL, bench.va),
    ) * 2:
        bench.run(code, a0=address)
        seen = [(trap.error_code, trap.address, trap.cr2) for trap in bench.traps]
        blind = isinstance(bench.hooks.state, NoExceptionState)
        about = 0 if blind or cause == CAUSE_ILLEGAL else address
        if seen != [(cause, place, about)]:
            raise HardwareError(f"exception {cause} arrived as {[str(trap) for trap in bench.traps]}")


def check_breakpoint_without_handler(bench: Bench) -> None:
    """Check that an ebreak without a handler is reported as a breakpoint trap at its address."""
    bench.run(_NOP + EBREAK)
    if [(trap.vector, trap.address) for trap in bench.traps] != [(Vector.BREAKPOINT, bench.va + 4)]:
        raise HardwareError(f"ebreak arrived as {[str(trap) for trap in bench.traps]}")


def check_wfi_ends_run(bench: Bench) -> None:
    """Check that wfi ends the run; see check_halt_ends_run."""
    check_halt_ends_run(bench, _NOP)


def check_patched_text(bench: Bench) -> None:
    """Check that patched text runs; see check_changed_code_runs."""
    check_changed_code_runs(bench, _ONE, _TWO, "a0")


def check_trap_registers(bench: Bench) -> None:
    """Check that the guest reads sepc, scause and stval as the host has set them, and that sret uses them."""
    for number, value in ((SEPC, bench.va + 16), (SCAUSE, 7), (STVAL, 9)):
        bench.engine.reg_write(number, value)
    end = bench.run(_READ_TRAP_REGISTERS)
    if (end.a0, end.a1, end.a2) != (bench.va + 16, 7, 9):
        raise HardwareError(f"trap registers read as {end.a0:#x}, {end.a1}, {end.a2}")
    bench.regs.flags = end.flags & ~SR_SIE | SR_SPIE | SR_SPP
    end = bench.run(_SRET + _ILLEGAL * 3)
    bench.regs.flags = end.flags & ~SR_SIE
    if end.ip != bench.va + 20 or not end.flags & SR_SIE:
        raise HardwareError(f"sret went to {end.ip:#x}, status {end.flags:#x}")


CHECKS: tuple[Callable[[Bench], None], ...] = (
    check_breakpoints_in_a_row,
    check_faults,
    check_breakpoint_without_handler,
    check_wfi_ends_run,
    check_patched_text,
    check_trap_registers,
)


def adapt(bench: Bench, cpu: int | None) -> list[SelfTest]:
    """Adapt the machine's hooks to this version of Unicorn, and check that Unicorn then behaves like a CPU.

    Return the results of the self-tests. `cpu` is the result of `find_cpu_state`. If it is None, the address
    of a page fault is read from saved contexts, and no error field is used.

    Raises: HardwareError (a check failed: Unicorn can't be used).
    """
    hooks = bench.hooks
    assert isinstance(hooks, RiscvTrapHooks)
    cells = find_bad_address(bench)
    if cells is not None:
        first, offset = cells
        hooks.state = (
            ContextBadAddress(bench.engine, offset) if cpu is None else LiveBadAddress(cpu + offset - first)
        )
    cell = None if cpu is None else find_error_cell(bench)
    if cell is not None:
        hooks.use_error_cell(cell)
    return [
        found(find_cpu_state, cpu is not None),
        found(find_bad_address, cells is not None),
        found(find_error_cell, cell is not None),
        stop_between_blocks(bench, _ONE, _NEXT, _TWO, "a0"),
        *run_checks(bench, CHECKS),
    ]
