"""Finding out where the library differs from a CPU: a bench for its code, the way to its live registers."""

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
"""Where in the machine's own text page the self-test puts its code."""

HANDLE_SIZE = 4096
"""Bytes of the library's handle in which pointers to the CPU, and its error, are looked for."""
_CPU_SIZE = 64 << 10


class Outcome(Enum):
    """How a self-test went."""

    OK = "ok"
    FALLBACK = "fallback"
    """The quick way isn't there; the API's is used."""


@dataclass(frozen=True)
class SelfTest:
    """Result for one deviation."""

    name: str
    outcome: Outcome


class Bench:
    """Runs a few bytes of code on a stopped machine and keeps what it trapped with."""

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
        """The library's, of the last run."""

    def put(self, code: bytes) -> None:
        """Place code (and a halt) without telling the engine."""
        self.memory.ram[self._pa : self._pa + len(code) + len(self.cpu.halt)] = code + self.cpu.halt

    def run(self, code: bytes, **registers: int) -> Any:
        """Run code up to its end or to its first trap."""
        self.put(code)
        self.engine.flush_code()
        for name, value in registers.items():
            self.regs.set(name, value)
        self.regs.sp = self._stack
        return self.resume()

    def resume(self, ip: int | None = None) -> Any:
        """Run what is there."""
        self.traps.clear()
        self.hooks.dispatch = self._stop
        self.error = self.hooks.run(self.va if ip is None else ip)
        self.hooks.check()
        return self.regs.snapshot()

    def _stop(self, trap: Trap) -> None:
        self.traps.append(trap)
        self.hooks.end_run()


def find_cpu_state(engine: Engine, cpu: CpuModel) -> int | None:
    """Address of the engine's live registers, by content: the handle points to the CPU, which holds them.

    None if it isn't found, or if what was found doesn't follow the API (a copy left by another engine).
    Registers are as before.
    """
    kept = {register: engine.reg_read(register) for register in cpu.registers.values()}
    try:
        return _find_registers(engine, cpu, mark_registers(engine, cpu))
    finally:
        # A guest that starts with what marked them isn't the same twice.
        for register, value in kept.items():
            engine.reg_write(register, value)


def _find_registers(engine: Engine, cpu: CpuModel, pattern: bytes) -> int | None:
    handle = own_memory(engine.address, HANDLE_SIZE)
    for pointer in dict.fromkeys(struct.unpack(f"<{len(handle) // 8}Q", handle)):
        for found in _search(pointer, pattern):
            if _follows_api(engine, cpu, found):
                return found
    return None


def own_memory(address: int, size: int) -> bytes:
    """What lies in this process, nothing where that can't be read; a stale pointer is no crash."""
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
    """Give the general registers values that are nowhere else; returns them as they lie in memory."""
    pattern = b""
    for register in list(cpu.registers.values())[:-1]:
        value = os.urandom(cpu.word_size)
        engine.reg_write(register, int.from_bytes(value, "little"))
        pattern += value.ljust(STATE_SLOT, b"\0")
    return pattern


def context_words(engine: Engine, context: ctypes.c_void_p, code: Literal["i", "Q"]) -> memoryview:
    """The engine's CPU state, saved into `context`, as numbers of this format."""
    engine.context_save(context)
    assert context.value is not None
    data = ctypes.string_at(context.value, engine.context_size())
    return memoryview(data[: len(data) & -struct.calcsize(code)]).cast(code)


def found(function: Callable[..., object], is_there: bool) -> SelfTest:
    """Result of looking for what the library hides."""
    return SelfTest(function.__name__, Outcome.OK if is_there else Outcome.FALLBACK)


def run_checks(bench: Bench, checks: Iterable[Callable[[Bench], None]]) -> Iterator[SelfTest]:
    """Raises: HardwareError (a check failed: the library can't be used)."""
    for check in checks:
        check(bench)
        yield SelfTest(check.__name__, Outcome.OK)
    bench.put(bytes(16))


def check_changed_code_runs(bench: Bench, old: bytes, new: bytes, result: str) -> None:
    """Unicorn runs stale code after a physical write until the virtual address is invalidated.

    `old` and `new` put 1 and 2 into the register `result`.
    """
    bench.run(old)
    bench.put(new)
    bench.engine.remove_cache(bench.va, bench.va + len(new) + len(bench.cpu.halt))
    if getattr(bench.resume(), result) != 2:
        raise HardwareError("invalidated code still runs")


def check_halt_ends_run(bench: Bench, nop: bytes) -> None:
    """Unicorn returns at a halt, behind it, and runs on from there (a CPU would wait for an interrupt)."""
    end = bench.run(nop).ip
    if end != bench.va + len(nop) + len(bench.cpu.halt) or bench.resume(bench.va).ip != end:
        raise HardwareError(f"a halt left the instruction pointer at {end:#x}")


def _search(pointer: int, pattern: bytes) -> Iterator[int]:
    if pointer < 0x10000 or pointer >> 47:
        return
    data = own_memory(pointer, _CPU_SIZE)
    at = data.find(pattern)
    while at >= 0:
        yield pointer + at
        at = data.find(pattern, at + 1)


def _follows_api(engine: Engine, cpu: CpuModel, address: int) -> bool:
    """Whether pokes at `address` are seen through the API and the reverse, first and last register."""
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
