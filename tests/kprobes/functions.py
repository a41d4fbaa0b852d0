"""Execution of whole functions with a count of each instruction; runs with probes are compared with runs
without.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from emulated_kernel.kprobes.kinds.batch import register_all
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.traps.trap import Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import CODE_CALLBACK, HOOK_CODE
from tests.kprobes.boundaries import Boundary
from tests.kprobes.transparency import Changes
from tests.sample import fewer
from tests.snapshot import DataSnapshot

MAX_STEPS = fewer(3000, 3)
"""Number of instructions after which a call is too long.

Few calls that end take more than a third of this number.
"""


@dataclass(frozen=True)
class Outcome:
    """End of a call: its trap (return, fault or hypercall), the registers, and the changed bytes."""

    trap: Trap
    end: RegisterSet
    changes: Changes = field(repr=False)


class Runner:
    """Calls functions of a stopped machine, and restores its memory after each call."""

    def __init__(self, machine: Machine, memory: DataSnapshot, boundaries: list[Boundary]) -> None:
        self._machine = machine
        self._memory = memory
        self._ex_table = dict(machine.image.ex_table)
        self._at = {b.addr: b for b in boundaries}
        self._mask = (1 << machine.model.bits) - 1
        self._counts: Counter[int] = Counter()
        self._last = 0
        """Address of the instruction that was counted last."""
        self._left = 0
        """Number of instructions that may still be counted."""
        self._is_left_out = False

    def call(self, start: RegisterSet) -> Outcome:
        """Run a call to its end and restore the memory. An exception with a fixup continues at the fixup."""
        trap, end = self._machine.trap_of(start, fixup=True)
        return Outcome(trap, end, self._memory.undo())

    def counted(self, starts: Iterable[RegisterSet]) -> list[tuple[RegisterSet, Counter[int]]]:
        """Return each call with instruction -> number of executions, including attempts that fault.

        Leave out long calls, and calls that read text: as on Linux, these would find breakpoints there.
        """
        engine = self._machine.hooks.engine
        hook = engine.add_hook(HOOK_CODE, CODE_CALLBACK(self._count))
        engine.flush_code()
        try:
            return [(start, counts) for start in starts if (counts := self._counts_of(start)) is not None]
        finally:
            engine.remove_hook(hook)
            engine.flush_code()

    def _counts_of(self, start: RegisterSet) -> Counter[int] | None:
        self._counts = Counter()
        self._last = 0
        self._left = MAX_STEPS
        self._is_left_out = False
        self._machine.trap_of(start, fixup=True)
        self._memory.restore()
        return None if self._is_left_out else self._counts

    def _count(self, _engine: int, address: int, _size: int, _data: int) -> None:
        """Count an instruction that is about to be executed, with all its repetitions as one."""
        hooks = self._machine.hooks
        # Unicorn: a breakpoint that ends the run is followed by the hook of the next instruction.
        if hooks.stopped_by is not None:
            return
        boundary = self._at.get(address)
        if boundary is not None:
            if boundary.repeats and address == self._last:
                return
            addresses = (operand.address(self._machine.regs, self._mask) for operand in boundary.operands)
            self._is_left_out = any(map(self._is_text, addresses))
        self._last = address
        self._counts[address] += 1
        self._left -= 1
        if self._left == 0:
            self._is_left_out = True
        if self._is_left_out:
            hooks.stop(Trap(TrapKind.BUDGET, address))

    def loses_flags(self, executed: Iterable[int]) -> bool:
        """Return True if the emulator may report wrong flags after a call that executed these instructions.

        Unicorn: cmpxchg8b resets all flags except ZF to their values at the start of its block.
        """
        original = self._machine.text.original
        return any(
            original(at, 3).removeprefix(b"\xf0")[:2] == b"\x0f\xc7" for at in executed if at in self._at
        )

    def _is_text(self, address: int) -> bool:
        return any(start - 8 < address < end for start, end in self._machine.image.text_ranges)


class ProbesEverywhere:
    """Probes that count hits, on all given instructions that can be probed."""

    def __init__(self, kprobes: Kprobes, boundaries: Sequence[Boundary]) -> None:
        self._kprobes = kprobes
        self.hits: Counter[int] = Counter()
        self.probes = [
            Kprobe(addr=b.addr, pre_handler=self._hit, post_handler=self._behind)
            for b in boundaries
            if b.refusal is None
        ]
        self.behind = 0

    def _hit(self, kprobe: Kprobe, _regs: Any) -> None:
        self.hits[kprobe.address] += 1

    def _behind(self, _kprobe: Kprobe, _regs: Any) -> None:
        self.behind += 1

    def __enter__(self) -> ProbesEverywhere:
        register_all(self.probes, self._kprobes.register_kprobe, self._kprobes.unregister_kprobe)
        return self

    def __exit__(self, *_error: object) -> None:
        for probe in self.probes:
            self._kprobes.unregister_kprobe(probe)
