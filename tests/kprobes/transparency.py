"""Execution of one instruction with and without a probe, and comparison of the effects."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.machine.cpu.x86 import INT3
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.traps.trap import MemoryFault, Trap, TrapKind
from emulated_kernel.util.abi import Vector
from tests.kprobes.states import MAX_REPETITIONS, TF
from tests.snapshot import DataSnapshot

Changes = dict[int, tuple[int, int]]


@dataclass(frozen=True)
class Fault:
    """An exception as the guest would get it."""

    vector: int
    error_code: int
    address: int
    cr2: int

    @classmethod
    def of(cls, trap: Trap) -> Fault:
        return cls(trap.vector, trap.error_code, trap.address, trap.cr2)


@dataclass(frozen=True)
class Effect:
    """Effect of an instruction: the registers after it or at its fault, the fault, and the changed bytes."""

    end: RegisterSet
    fault: Fault | None
    changes: Changes

    def without_trap_flag(self) -> Effect:
        return Effect(self.end._replace(flags=self.end.flags & ~TF), self.fault, self.changes)


class Stepper:
    """Executes single instructions of a stopped machine, and restores its memory after each one."""

    def __init__(self, machine: Machine, memory: DataSnapshot) -> None:
        self._machine = machine
        self._memory = memory
        self.runs = 0
        self.faults: Counter[Fault] = Counter()
        self._behind: RegisterSet | None = None

    def unprobed(self, start: RegisterSet) -> Effect:
        """Execute the unprobed instruction with the trap flag set, and clear the flag in the result.

        A repeated instruction traps after each repetition.
        """
        state = start._replace(flags=start.flags | TF)
        for _ in range(MAX_REPETITIONS + 1):
            trap, state = self._machine.trap_of(state)
            if trap.vector != Vector.DEBUG:
                return self._effect(state, Fault.of(trap))
            if state.ip != start.ip:
                return self._effect(state, None)
        raise AssertionError(f"{start.ip:#x} repeats without an end")

    def up_to(self, start: RegisterSet, next_ip: int) -> Effect:
        """Execute the instruction up to a breakpoint after it.

        This is for pushf, which stores the trap flag, for pause, and for hits that guest code handles.
        Unicorn: `pause` does not trap, and the next instruction is executed too.
        """
        text = self._machine.text
        text.poke(next_ip, INT3)
        try:
            trap, state = self._machine.trap_of(start)
        finally:
            text.poke(next_ip, text.original(next_ip, 1))
        if (trap.vector, trap.address) == (Vector.BREAKPOINT, next_ip + 1):
            return self._effect(state._replace(ip=next_ip), None)
        return self._effect(state, Fault.of(trap))

    def led_to(self, start: RegisterSet, unprobed: Effect) -> Effect:
        """Execute an instruction until the CPU reaches the address at which the `unprobed` execution ended.

        A breakpoint at this address ends the run. Outside of the text, the fault of the next fetch ends the
        run.
        """
        ip = unprobed.end.ip
        if unprobed.fault is None:
            # The guest may have a breakpoint of its own there.
            breakpoints = self._machine.breakpoints
            handler = breakpoints.pop(ip, None)
            try:
                return self.up_to(start, ip)
            except MemoryFault:
                pass
            finally:
                if handler is not None:
                    breakpoints[ip] = handler
        trap, state = self._machine.trap_of(start)
        has_led = unprobed.fault is None and state.ip == ip
        return self._effect(state, None if has_led else Fault.of(trap))

    def probed(self, start: RegisterSet) -> Effect:
        """Execute the instruction at `start.ip`, where a probe made by probe() is registered.

        Hit its breakpoint, and stop after the instruction.
        """
        self._behind = None
        trap, state = self._machine.trap_of(start)
        if trap.kind is TrapKind.HYPERCALL and trap.address == self._machine.model.layout.host_text + 1:
            assert self._behind is not None, "the step's end was not seen"
            return self._effect(self._behind, None)
        return self._effect(state, Fault.of(trap))

    def probe(self, addr: int) -> Kprobe:
        """Return a probe, not yet registered, that ends the run after the probed instruction."""
        return Kprobe(addr=addr, post_handler=self._stop)

    def _stop(self, _kprobe: Kprobe, regs: Any) -> None:
        self._behind = regs.snapshot()
        regs.ip = self._machine.model.layout.host_text

    def _effect(self, end: RegisterSet, fault: Fault | None) -> Effect:
        self.runs += 1
        if fault is not None:
            self.faults[fault] += 1
        return Effect(end, fault, self._memory.undo())


def differences(unprobed: Effect, probed: Effect) -> list[str]:
    """Return descriptions of the differences; none if the probe has no visible effect."""
    found = [
        f"{name}: {a:#x} unprobed, {b:#x} probed"
        for name, a, b in zip(RegisterSet._fields, unprobed.end, probed.end, strict=True)
        if a != b
    ]
    if unprobed.fault != probed.fault:
        found.append(f"fault: {unprobed.fault} unprobed, {probed.fault} probed")
    for address in sorted(unprobed.changes.keys() | probed.changes.keys()):
        a, b = unprobed.changes.get(address), probed.changes.get(address)
        if a != b:
            found.append(f"memory {address:#x}: {a} unprobed, {b} probed")
    return found
