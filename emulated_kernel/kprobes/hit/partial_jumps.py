"""PartialJumpDetector: finds CPUs that are between the two instructions of a jump or call."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.probe_checks import ProbeChecker
from emulated_kernel.kprobes.table import ProbeTable
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.text.text_poke import TextPoker


class PartialJumpDetector:
    """Finds CPUs that have executed only the first instruction of a jump or call of two instructions.

    On x86 a jump is a single instruction, so no CPU is ever in the middle of it.
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
        """Offsets in bytes from the start of a jump or call at which a CPU may be in the middle of it.

        The range is empty if a jump is a single instruction.
        """
        self._first = arch.call_size // 2
        """Size in bytes of the first of the two instructions."""

    def contains(self, ip: int) -> bool:
        """Return True if `ip` is in the middle of an optimized probe's jump, or of an fentry site's call."""
        for distance in self._reach:
            head = self._table.get(ip - distance)
            if ip - distance in self._verdict.fentry or (head is not None and head.is_optimized):
                return True
        return False

    def may_patch(self) -> bool:
        """Return True if a hit may retarget a jump or call.

        Return False if a change of the text is not complete yet. Also return False if a CPU is in the middle
        of a jump or call, because a hit can't make another CPU finish it.
        """
        if self._poker.is_busy:
            return False
        return not self._reach or not any(self.contains(ip) for ip, _ in self._machine.positions())

    def start_again(self, places: Iterable[int]) -> None:
        """Move CPUs from the middle of the jumps or calls at `places` back to their start.

        The CPUs then run the new code. So a hit can change the text at once. It does no harm to execute the
        first instruction twice: it only sets a register that is used by the jump or call alone.
        """
        middles = {place + self._first: place for place in places} if self._reach else {}
        for number, (ip, _) in enumerate(self._machine.positions() if middles else ()):
            if ip in middles:
                self._machine.send_back(number, middles[ip])
