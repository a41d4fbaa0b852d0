"""Execution of whole functions with a count of each instruction, to compare them with and without probes."""

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
from emulated_kernel.machine.traps.trap import Trap
from emulated_kernel.util.abi import Vector
from tests.kprobes.boundaries import Boundary
from tests.kprobes.states import TF
from tests.kprobes.transparency import Changes
from tests.sample import fewer
from tests.snapshot import DataSnapshot

MAX_STEPS = fewer(3000, 3)
"""Maximum number of instructions of a call that are counted one by one.

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

    def call(self, start: RegisterSet) -> Outcome:
        """Run a call to its end; an exception with a fixup continues there."""
        trap, end = self._machine.trap_of(start, fixup=True)
        return Outcome(trap, end, self._memory.undo())

    def count(self, start: RegisterSet) -> Counter[int] | None:
        """Return instruction of the call -> number of times that it is executed or tried.

        Return None for a long call, and for a call that reads text, in which it finds breakpoints, as on
        Linux.
        """
        counts: Counter[int] = Counter()
        state = start
        for _ in range(MAX_STEPS):
            boundary = self._at.get(state.ip)
            counts[state.ip] += 1
            if boundary is not None and any(
                self._is_text(o.address(state, self._mask)) for o in boundary.operands
            ):
                break
            trap, state = self._step(state, boundary)
            if trap.vector == Vector.BREAKPOINT and not (boundary and boundary.hides_trap):
                # One of the kernel's own, at which it calls the host: here nobody answers.
                self._memory.restore()
                return counts
            if trap.vector not in (Vector.DEBUG, Vector.BREAKPOINT):
                if trap.address not in self._ex_table:
                    self._memory.restore()
                    return counts
                state = state._replace(ip=self._ex_table[trap.address])
        self._memory.restore()
        return None

    def loses_flags(self, executed: Iterable[int]) -> bool:
        """Return True if the emulator may report wrong flags after a call that executed these instructions.

        Unicorn: cmpxchg8b resets the flags that it does not set to their values at the start of its block.
        """
        original = self._machine.text.original
        return any(
            original(at, 3).removeprefix(b"\xf0")[:2] == b"\x0f\xc7" for at in executed if at in self._at
        )

    def _is_text(self, address: int) -> bool:
        return any(start - 8 < address < end for start, end in self._machine.image.text_ranges)

    def _step(self, state: RegisterSet, boundary: Boundary | None) -> tuple[Trap, RegisterSet]:
        """Execute one instruction with all its repetitions."""
        if boundary is not None and boundary.hides_trap:
            return self._up_to(state, boundary.addr + boundary.size)
        ip = state.ip
        while True:
            trap, state = self._machine.trap_of(state._replace(flags=state.flags | TF))
            state = state._replace(flags=state.flags & ~TF)
            repeats = boundary is not None and boundary.repeats and state.ip == ip
            if trap.vector != Vector.DEBUG or not repeats:
                return trap, state

    def _up_to(self, state: RegisterSet, next_ip: int) -> tuple[Trap, RegisterSet]:
        text = self._machine.text
        text.poke(next_ip, b"\xcc")
        trap, state = self._machine.trap_of(state)
        text.poke(next_ip, text.original(next_ip, 1))
        return trap, state._replace(ip=next_ip) if trap.address == next_ip + 1 else state


class ProbesEverywhere:
    """Probes that count hits, on each instruction of a set that can be probed."""

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
