"""Where the library differs from an x86 CPU: each deviation found or checked at start, one function each."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

from emulated_kernel.abi import Vector
from emulated_kernel.machine import cpu_x86
from emulated_kernel.machine.cpu import CpuModel
from emulated_kernel.machine.engine import Engine
from emulated_kernel.machine.exceptions import (
    NONE_IN_FLIGHT,
    CleanContextExceptionState,
    ContextExceptionState,
    ExceptionState,
    LiveExceptionState,
)
from emulated_kernel.machine.quirks import Bench, Outcome, SelfTest, find_cpu_state, mark_registers
from emulated_kernel.machine.traps import HardwareError

_DIV_BY_ZERO = bytes.fromhex("31c9 f7f1")  # xor ecx, ecx; div ecx
_READ = bytes.fromhex("8b03")  # mov eax, [rbx]
_WRITE = bytes.fromhex("8903")  # mov [rbx], eax
_JUMP = bytes.fromhex("ffe3")  # jmp rbx
_UNMAPPED = 0x1000


def _context_bytes(engine: Engine, context: ctypes.c_void_p) -> bytes:
    engine.context_save(context)
    assert context.value is not None
    return ctypes.string_at(context.value, engine.context_size())


def find_exception_cells(bench: Bench) -> tuple[int, int, int] | None:
    """Offsets in a saved context: first register, exception error code, exception in flight.

    Four faults with known codes are compared with a clean state; None if that leaves no single cell.
    """
    engine = bench.engine
    clean, context = engine.context_alloc(), engine.context_alloc()
    pattern = mark_registers(engine, bench.cpu)
    before = _context_bytes(engine, clean)
    first = before.find(pattern)
    start = _words(before)
    errors = list(range(len(start)))
    in_flight = [at for at, word in enumerate(start) if word == NONE_IN_FLIGHT]
    for code, rbx, error, vector in known_faults(bench.cpu):
        engine.context_restore(clean)
        bench.run(code, bx=rbx)
        after = _words(_context_bytes(engine, context))
        errors = [at for at in errors if after[at] == error]
        in_flight = [at for at in in_flight if after[at] == vector]
    engine.context_restore(clean)
    if first < 0 or len(errors) != 1 or len(in_flight) != 1:
        return None
    return first, errors[0] * 4, in_flight[0] * 4


def _words(data: bytes) -> memoryview:
    return memoryview(data[: len(data) & ~3]).cast("i")


def known_faults(cpu: CpuModel) -> tuple[tuple[bytes, int, int, Vector], ...]:
    """Code, its rbx, the error code and vector it must fault with; the rarest error code first."""
    return (
        (_JUMP, cpu.layout.direct_map, 0x11, Vector.PAGE_FAULT),
        (_WRITE, cpu.layout.host_text, 0x3, Vector.PAGE_FAULT),
        (_READ, _UNMAPPED, 0, Vector.PAGE_FAULT),
        (_DIV_BY_ZERO, 0, 0, Vector.DIVIDE_ERROR),
    )


def exception_state(bench: Bench, cells: tuple[int, int, int] | None, cpu: int | None) -> ExceptionState:
    """The best way there is to read and acknowledge an exception."""
    if cells is None:
        return CleanContextExceptionState(bench.engine, bench.regs)
    first, error_code, in_flight = cells
    if cpu is None:
        return ContextExceptionState(bench.engine, error_code, in_flight)
    return LiveExceptionState(cpu + error_code - first, cpu + in_flight - first)


def check_faults_in_a_row(bench: Bench) -> None:
    """Unicorn keeps the last fault in flight for ever: unacknowledged, the next one is a double fault."""
    for code, rbx, _, vector in known_faults(bench.cpu) * 2:
        bench.run(code, bx=rbx)
        if [trap.vector for trap in bench.traps] != [vector]:
            raise HardwareError(f"exception {vector} arrived as {[str(trap) for trap in bench.traps]}")


def check_hlt_ends_run(bench: Bench) -> None:
    """Unicorn returns at hlt, behind it, and runs on from there (a CPU would wait for an interrupt)."""
    end = bench.run(b"\x90").ip
    if end != bench.va + 2 or bench.resume(bench.va).ip != end:
        raise HardwareError(f"hlt left the instruction pointer at {end:#x}")


def check_patched_text(bench: Bench) -> None:
    """Unicorn runs stale code after a physical write until the virtual address is invalidated."""
    bench.run(bytes.fromhex("b801000000"))  # mov eax, 1
    bench.put(bytes.fromhex("b802000000"))
    bench.engine.remove_cache(bench.va, bench.va + 6)
    if bench.resume().ax != 2:
        raise HardwareError("invalidated code still runs")


def check_undefined_instruction(bench: Bench) -> None:
    """Unicorn has a hook of its own for ud2, called with the address of the instruction."""
    bench.run(bytes.fromhex("0f0b"))
    if [(trap.vector, trap.address) for trap in bench.traps] != [(Vector.INVALID_OPCODE, bench.va)]:
        raise HardwareError("ud2 did not arrive as #UD")


def check_breakpoint(bench: Bench) -> None:
    """int3 is seen behind the instruction, and a changed instruction pointer is where the guest goes on."""
    bench.hooks.breakpoints[bench.va] = lambda regs: regs.set("ip", regs.ip + 1)
    try:
        end = bench.run(cpu_x86.INT3 + bytes.fromhex("0f0b")[:1] + b"\x90")
    finally:
        del bench.hooks.breakpoints[bench.va]
    if bench.traps or end.ip != bench.va + 4:
        raise HardwareError(f"int3 handler: the guest went on to {end.ip:#x}")


def check_flags(bench: Bench) -> None:
    """Unicorn computes arithmetic flags when asked; a write must be seen by the guest, fixed bit included."""
    bench.regs.flags = 0x8D5 & ~0x100
    end = bench.run(bytes.fromhex("9c58"))  # pushf; pop rax
    if end.ax & 0x8D5 != 0x8D5 & ~0x100 or end.flags & 0x8D5 != 0x8D5 & ~0x100:
        raise HardwareError(f"flags written as 0x8d5 read as {end.flags:#x} and {end.ax:#x}")


CHECKS: tuple[Callable[[Bench], None], ...] = (
    check_faults_in_a_row,
    check_hlt_ends_run,
    check_patched_text,
    check_undefined_instruction,
    check_breakpoint,
    check_flags,
)


def adapt(bench: Bench, cpu: int | None) -> list[SelfTest]:
    """Make the machine's hooks fit this library and check that it then behaves like a CPU.

    `cpu` is what `find_cpu_state` found.

    Raises:
        HardwareError: a check failed: the library can't be used.
    """
    registers = Outcome.FALLBACK if cpu is None else Outcome.OK
    results = [SelfTest(find_cpu_state.__name__, registers, "API" if cpu is None else f"{cpu:#x}")]
    cells = find_exception_cells(bench)
    bench.hooks.state = exception_state(bench, cells, cpu)
    kind = Outcome.FALLBACK if cells is None else Outcome.OK
    results.append(SelfTest(find_exception_cells.__name__, kind, type(bench.hooks.state).__name__))
    for check in CHECKS:
        check(bench)
        results.append(SelfTest(check.__name__, Outcome.OK))
    bench.put(bytes(16))
    return results
