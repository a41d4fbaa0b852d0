"""Harness of the start-up self-test: runs test code, finds Unicorn's CPU structure, and has common checks."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from typing import Any, Literal

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.cpu.registers import STATE_SLOT
from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.traps.trap import HardwareError, Trap
from emulated_kernel.machine.unicorn_engine import Engine
from emulated_kernel.util.fast_dataclass import dataclass

CODE_OFFSET = 0x800
"""Offset of the self-test's code in the host's text page."""

HANDLE_SIZE = 4096
"""Number of bytes of Unicorn's handle that are searched for pointers to the CPU and for the error field."""
_CPU_SIZE = 64 << 10
_REGISTERS: dict[str, tuple[int, int]] = {}
"""Name of the CPU model -> place of the live registers that the latest search in Unicorn's memory has found.

The place is the index of a pointer in Unicorn's handle, and an offset in bytes from the pointer's target. The
search in the next engine tries this place first, and uses it only if the registers are there.
"""


class Outcome(Enum):
    """Outcome of the self-test of one deviation of Unicorn: success, or use of a fallback."""

    OK = "ok"
    FALLBACK = "fallback"
    """Hidden state of Unicorn wasn't found; the slower API is used."""


@dataclass(frozen=True)
class SelfTest:
    """Result of the self-test of one deviation of Unicorn from the hardware."""

    name: str
    outcome: Outcome


class Bench:
    """Runs a few bytes of test code on a stopped machine, and records the traps of this code."""

    def __init__(self, hooks: TrapHooks, memory: Memory, stack: int) -> None:
        self.engine = hooks.engine
        self.cpu = hooks.cpu
        self.regs = hooks.regs
        self.hooks = hooks
        self.memory = memory
        self._stack = stack
        self.va = self.cpu.layout.host_text + CODE_OFFSET
        self._pa = memory.translate(self.va)
        self.traps: list[Trap] = []
        self.error = 0
        """Unicorn's error code of the last run."""

    def put(self, code: bytes) -> None:
        """Write `code` and a halt to the memory for test code; old translated code stays in the cache."""
        self.memory.ram[self._pa : self._pa + len(code) + len(self.cpu.halt)] = code + self.cpu.halt

    def run(self, code: bytes, **registers: int) -> Any:
        """Run `code` to its end or to the first trap; return the registers, as Regs.snapshot() does.

        `registers`: values to which registers are set before the run, by name.
        """
        self.put(code)
        self.engine.flush_code()
        for name, value in registers.items():
            self.regs.set(name, value)
        self.regs.sp = self._stack
        return self.resume()

    def resume(self, ip: int | None = None) -> Any:
        """Run the code that `put` has written, from its start or from `ip`.

        Return the registers, as Regs.snapshot() does.
        """
        self.traps.clear()
        self.hooks.dispatch = self._stop
        self.error = self.hooks.run(self.va if ip is None else ip)
        self.hooks.check()
        return self.regs.snapshot()

    def _stop(self, trap: Trap) -> None:
        self.traps.append(trap)
        self.hooks.end_run()


def find_cpu_state(engine: Engine, cpu: CpuModel) -> int | None:
    """Return the address in this process at which Unicorn keeps the live registers of the engine.

    The search looks for the registers' contents in the memory to which the engine's handle points. Return
    None if they aren't found, or only in stale copies, which API calls don't change. The registers are
    restored.
    """
    kept = {register: engine.reg_read(register) for register in cpu.registers.values()}
    try:
        return _find_registers(engine, cpu, mark_registers(engine, cpu))
    finally:
        # The marks are random: a guest that started with them would not be reproducible.
        for register, value in kept.items():
            engine.reg_write(register, value)


def _find_registers(engine: Engine, cpu: CpuModel, pattern: bytes) -> int | None:
    handle = own_memory(engine.address, HANDLE_SIZE)
    pointers: tuple[int, ...] = struct.unpack(f"<{len(handle) // 8}Q", handle)
    if cpu.name in _REGISTERS and pointers:
        slot, offset = _REGISTERS[cpu.name]
        found = pointers[slot] + offset
        if next(_search(found, pattern, len(pattern)), None) and _follows_api(engine, cpu, found):
            return found
    for pointer in dict.fromkeys(pointers):
        for found in _search(pointer, pattern, _CPU_SIZE):
            if _follows_api(engine, cpu, found):
                _REGISTERS[cpu.name] = pointers.index(pointer), found - pointer
                return found
    return None


def own_memory(address: int, size: int) -> bytes:
    """Return `size` bytes of this process's memory at `address`, or b"" if they are unreadable.

    The bytes are read by the host's kernel, so that a stale pointer can't crash the process.
    """
    try:
        memory = os.open("/proc/self/mem", os.O_RDONLY)
    except OSError:
        return b""
    try:
        return os.pread(memory, size, address)
    except OSError:
        return b""
    finally:
        os.close(memory)


def mark_registers(engine: Engine, cpu: CpuModel) -> bytes:
    """Set the general registers to random values, so that they can be found in memory.

    Return the bytes that Unicorn's CPU structure must then contain.
    """
    pattern = b""
    for register in list(cpu.registers.values())[:-1]:
        value = os.urandom(cpu.word_size)
        engine.reg_write(register, int.from_bytes(value, "little"))
        pattern += value.ljust(STATE_SLOT, b"\0")
    return pattern


def context_words(engine: Engine, context: ctypes.c_void_p, code: Literal["i", "Q"]) -> memoryview:
    """Save the engine's CPU state into `context`, and return the state as an array of numbers.

    `code`: type of a number, as in Python's struct module: "i" (signed 32 bits) or "Q" (unsigned 64 bits).
    """
    engine.context_save(context)
    assert context.value is not None
    data = ctypes.string_at(context.value, engine.context_size())
    return memoryview(data[: len(data) & -struct.calcsize(code)]).cast(code)


def found(function: Callable[..., object], is_there: bool) -> SelfTest:
    """Return the result of the self-test `function`, which searches for hidden state of Unicorn.

    The outcome is OK if `is_there` is True: the state was found. Otherwise the outcome is FALLBACK.
    """
    return SelfTest(function.__name__, Outcome.OK if is_there else Outcome.FALLBACK)


def run_checks(bench: Bench, checks: Iterable[Callable[[Bench], None]]) -> Iterator[SelfTest]:
    """Run checks and yield their results.

    Raises: HardwareError (a check failed: Unicorn can't be used).
    """
    for check in checks:
        check(bench)
        yield SelfTest(check.__name__, Outcome.OK)
    bench.put(bytes(16))


def check_changed_code_runs(bench: Bench, old: bytes, new: bytes, result: str) -> None:
    """Check that changed code runs after remove_cache().

    Unicorn: after a physical write, the engine runs stale code if the virtual address isn't invalidated. The
    code `old` sets the register `result` to 1, and the code `new` sets it to 2.
    """
    bench.run(old)
    bench.put(new)
    bench.engine.remove_cache(bench.va, bench.va + len(new) + len(bench.cpu.halt))
    if getattr(bench.resume(), result) != 2:
        raise HardwareError("invalidated code still runs")


def check_halt_ends_run(bench: Bench, nop: bytes) -> None:
    """Check that a halt ends the run with ip after the halt, and that a halt also ends a second run.

    `nop`: code to run before the halt.
    """
    end = bench.run(nop).ip
    if end != bench.va + len(nop) + len(bench.cpu.halt) or bench.resume(bench.va).ip != end:
        raise HardwareError(f"a halt left the instruction pointer at {end:#x}")


def _search(pointer: int, pattern: bytes, size: int) -> Iterator[int]:
    if pointer < 0x10000 or pointer >> 47:
        return
    data = own_memory(pointer, size)
    at = data.find(pattern)
    while at >= 0:
        yield pointer + at
        at = data.find(pattern, at + 1)


def _follows_api(engine: Engine, cpu: CpuModel, address: int) -> bool:
    """Return True if Unicorn keeps the registers at the host address `address`.

    In that case, reg_write() changes this memory, and reg_read() returns what is stored there.
    """
    state = (ctypes.c_uint64 * (cpu.ip_slot + 1)).from_address(address)
    first, *_, ip = cpu.registers.values()
    for register, slot in ((first, 0), (ip, cpu.ip_slot)):
        engine.reg_write(register, 0x5A5A0001)
        if state[slot] != 0x5A5A0001:
            return False
        state[slot] = 0x5A5A0002
        if engine.reg_read(register) != 0x5A5A0002:
            return False
    return True
