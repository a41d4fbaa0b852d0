"""Deviations of Unicorn from an x86 CPU. For each deviation, a function finds or checks it at start."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.machine.cpu import x86 as cpu_x86
from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.interrupts.exceptions import (
    NONE_IN_FLIGHT,
    CleanContextExceptionState,
    ContextExceptionState,
    ExceptionState,
    LiveExceptionState,
)
from emulated_kernel.machine.quirks.harness import (
    Bench,
    SelfTest,
    check_changed_code_runs,
    check_halt_ends_run,
    context_words,
    find_cpu_state,
    found,
    mark_registers,
    run_checks,
)
from emulated_kernel.machine.quirks.stops import stop_between_blocks
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.abi import Vector

_DIV_BY_ZERO = bytes.fromhex("31c9 f7f1")  # xor ecx, ecx; div ecx
_READ = bytes.fromhex("8b03")  # mov eax, [rbx]
_WRITE = bytes.fromhex("8903")  # mov [rbx], eax
_JUMP = bytes.fromhex("ffe3")  # jmp rbx
_NEXT = bytes.fromhex("eb00")  # jmp .+2
_ONE = bytes.fromhex("b801000000")  # mov eax, 1
_TWO = bytes.fromhex("b802000000")  # mov eax, 2
_STEP_NEXT = bytes.fromhex("9c 804c240101 9d")  # pushf; orb $1, 1(%rsp); popf
_UNMAPPED = 0x1000


def find_exception_cells(bench: Bench) -> tuple[int, int, int] | None:
    """Return the offsets, in bytes, of three fields in a saved context of Unicorn.

    The fields are the first register, the error code of an exception, and the mark of an exception in flight.
    Four faults with known codes are compared with a clean state. Return None if a field isn't unique.
    """
    engine = bench.engine
    clean = engine.context_alloc()
    context = engine.context_alloc()
    pattern = mark_registers(engine, bench.cpu)
    start = context_words(engine, clean, "i")
    first = start.tobytes().find(pattern)
    errors = list(range(len(start)))
    in_flight = [at for at, word in enumerate(start) if word == NONE_IN_FLIGHT]
    for code, rbx, error, vector in known_faults(bench.cpu):
        engine.context_restore(clean)
        bench.run(code, bx=rbx)
        after = context_words(engine, context, "i")
        errors = [at for at in errors if after[at] == error]
        in_flight = [at for at in in_flight if after[at] == vector]
    engine.context_restore(clean)
    if first < 0 or len(errors) != 1 or len(in_flight) != 1:
        return None
    return first, errors[0] * 4, in_flight[0] * 4


def known_faults(cpu: CpuModel) -> tuple[tuple[bytes, int, int, Vector], ...]:
    """Return faults that the self-test can raise: code, value of rbx for the code, error code, vector.

    The fault with the rarest error code comes first.
    """
    return (
        (_JUMP, cpu.layout.direct_map, 0x11, Vector.PAGE_FAULT),
        (_WRITE, cpu.layout.host_text, 0x3, Vector.PAGE_FAULT),
        (_READ, _UNMAPPED, 0, Vector.PAGE_FAULT),
        (_DIV_BY_ZERO, 0, 0, Vector.DIVIDE_ERROR),
    )


def exception_state(bench: Bench, cells: tuple[int, int, int] | None, cpu: int | None) -> ExceptionState:
    """Return the fastest available reader of exception state.

    `cells`: result of find_exception_cells(). `cpu`: result of find_cpu_state().
    """
    if cells is None:
        return CleanContextExceptionState(bench.engine, bench.regs)
    first, error_code, in_flight = cells
    if cpu is None:
        return ContextExceptionState(bench.engine, error_code, in_flight)
    return LiveExceptionState(cpu + error_code - first, cpu + in_flight - first)


def check_faults_in_a_row(bench: Bench) -> None:
    """Check that each of several faults in a row is reported with its own vector.

    Unicorn: a fault stays in flight forever; if it isn't acknowledged, the next one is a double fault.
    """
    for code, rbx, _, vector in known_faults(bench.cpu) * 2:
        bench.run(code, bx=rbx)
        if [trap.vector for trap in bench.traps] != [vector]:
            raise HardwareError(f"exception {vector} arrived as {[str(trap) for trap in bench.traps]}")


def check_hlt_ends_run(bench: Bench) -> None:
    """Check that hlt ends the run; see check_halt_ends_run."""
    check_halt_ends_run(bench, b"\x90")


def check_patched_text(bench: Bench) -> None:
    """Check that patched text runs; see check_changed_code_runs."""
    check_changed_code_runs(bench, _ONE, _TWO, "ax")


def check_undefined_instruction(bench: Bench) -> None:
    """Check that ud2 arrives as #UD.

    Unicorn: ud2 has a separate hook, which is called with the instruction's address.
    """
    bench.run(bytes.fromhex("0f0b"))
    if [(trap.vector, trap.address) for trap in bench.traps] != [(Vector.INVALID_OPCODE, bench.va)]:
        raise HardwareError("ud2 did not arrive as #UD")


def check_breakpoint(bench: Bench) -> None:
    """Check that int3 is reported with ip after it, and that the guest continues at a changed ip."""
    bench.hooks.breakpoints[bench.va] = lambda regs: regs.set("ip", regs.ip + 1)
    try:
        end = bench.run(cpu_x86.INT3 + bytes.fromhex("0f0b")[:1] + b"\x90")
    finally:
        del bench.hooks.breakpoints[bench.va]
    if bench.traps or end.ip != bench.va + 4:
        raise HardwareError(f"int3 handler: the guest went on to {end.ip:#x}")


def check_trap_flag(bench: Bench) -> None:
    """Check that TF traps after one instruction, and that TF can be cleared.

    If popf sets TF, the trap must come after the instruction that follows popf.
    """
    bench.regs.step(True)
    bench.run(b"\x90\x90")
    once = [(trap.vector, trap.address) for trap in bench.traps]
    ends = [(Vector.DEBUG, bench.va + 1)]
    bench.regs.step(False)
    bench.resume(bench.va + 1)
    more = list(bench.traps)
    bench.run(_STEP_NEXT + b"\x90\x90")
    behind = [(trap.vector, trap.address) for trap in bench.traps]
    bench.regs.step(False)
    if once != ends or more or behind != [(Vector.DEBUG, bench.va + len(_STEP_NEXT) + 1)]:
        raise HardwareError(f"the trap flag: {once}, then {more}, by popf {behind}")


def check_flags(bench: Bench) -> None:
    """Check that the guest sees the flags that the host has set, and bit 1, which is always set.

    Unicorn: flags are computed lazily.
    """
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
    check_trap_flag,
)


def adapt(bench: Bench, cpu: int | None) -> list[SelfTest]:
    """Adapt the machine's hooks to this version of Unicorn, and check that Unicorn then behaves like a CPU.

    Return the results of the self-tests. `cpu` is the result of `find_cpu_state`. If it is None, the state of
    an exception is read from saved contexts.

    Raises: HardwareError (a check failed: Unicorn can't be used).
    """
    cells = find_exception_cells(bench)
    bench.hooks.state = exception_state(bench, cells, cpu)
    return [
        found(find_cpu_state, cpu is not None),
        found(find_exception_cells, cells is not None),
        stop_between_blocks(bench, _ONE, _NEXT, _TWO, "ax"),
        *run_checks(bench, CHECKS),
    ]
