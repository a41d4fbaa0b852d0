"""PartialJumpDetector: where a jump or call is two instructions, a CPU may stand between them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.probe_checks import ProbeChecker
from emulated_kernel.kprobes.kprobe import AggrKprobe
from emulated_kernel.kprobes.table import ProbeTable
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.text.text_poke import TextPoker


class PartialJumpDetector:
    """Finds CPUs that have executed the first of the instructions that are patched as one.

    On x86 a jump is one instruction, and nobody is ever within it.
    """

    def __init__(
        self,
        machine: ProbedMachine,
        verdict: ProbeChecker[Any],
        arch: Arch,
        table: ProbeTable,
        poker: TextPoker,
    ) -> None:
        self._machine = machine
        self._verdict = verdict
        self._table = table
        self._poker = poker
        self._reach = range(1, arch.call_size) if arch.call_link is not None else range(0)
        """How far behind the start of a jump or call a CPU may stand within it; bytes."""
        self._first = arch.call_size // 2
        """Size of the first of the two instructions."""

    def contains(self, ip: int) -> bool:
        """Whether `ip` is within the jump of an optimized probe, or an fentry site, a call or nops."""
        for distance in self._reach:
            head = self._table.get(ip - distance)
            if ip - distance in self._verdict.fentry or (isinstance(head, AggrKprobe) and head.is_optimized):
                return True
        return False

    def may_patch(self) -> bool:
        """Whether a hit may retarget a jump or call: no CPU's ip may be in the middle of one then.

        Nor may text be being patched. Within a hit a CPU can't be run to the end of a split jump first.
        """
        if self._poker.is_busy:
            return False
        return not self._reach or not any(self.contains(ip) for ip, _ in self._machine.positions())

    def start_again(self, places: Iterable[int]) -> None:
        """CPUs in the middle of the jumps or calls that stand there begin them anew, as they are going to be.

        For what a hit has to change at once: it can't run another CPU to the end of one first. The first
        instruction sets a register that the jump alone uses, so that it may be executed again.
        """
        middles = {place + self._first: place for place in places} if self._reach else {}
        for number, (ip, _) in enumerate(self._machine.positions() if middles else ()):
            if ip in middles:
                self._machine.send_back(number, middles[ip])
