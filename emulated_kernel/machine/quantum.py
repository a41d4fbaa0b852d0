"""Quantum: preempts a CPU after a seeded number of instructions, so that another CPU can run."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.traps.trap import Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import CODE_CALLBACK, HOOK_CODE, Engine

_MIN_QUANTUM = 1
"""Minimum number of instructions of a run; an interrupt before the first one would lose the host's answer."""


class Quantum:
    """Ends runs after a random number of instructions, which a callback counts; for tests of several CPUs.

    The places where runs end depend on the seed and on the executed instructions, not on time.
    """

    def __init__(self, engine: Engine, hooks: TrapHooks, mean: int, seed: int) -> None:
        """Use runs of `mean` instructions on average, whose lengths a generator with `seed` selects.

        Raises: ValueError (`mean` is less than one).
        """
        if mean < _MIN_QUANTUM:
            raise ValueError(f"a quantum of {mean} instructions")
        self._hooks = hooks
        self._longest = 2 * mean - _MIN_QUANTUM
        self._dice = Random(seed)
        self._left = 0
        self._within: Callable[[int], bool] | None = None
        self._overdue = False
        self.may_end: list[Callable[[], bool]] = []
        """Functions that can delay the end of a quantum; see Machine.preempt_if."""
        engine.add_hook(HOOK_CODE, CODE_CALLBACK(self._count))
        # A stop in the hook, which is called before an instruction, must take effect at that instruction.
        engine.stop_between_blocks(False)
        engine.flush_code()

    def arm(self, within: range | None = None) -> None:
        """Start counting for the next run.

        If `within` is given, the run also ends at the first instruction outside of this range.
        """
        self._within = None if within is None else within.__contains__
        # The run ends before the instruction after its last one.
        self._left = self._dice.randint(_MIN_QUANTUM, self._longest) + 1

    def disarm(self) -> None:
        """Stop counting; calls of guest functions by the host aren't preempted."""
        self._left = 0
        self._within = None

    def stop_outside(self, within: Callable[[int], bool]) -> None:
        """End the next run at the first instruction for which `within` returns False."""
        self._within = within

    def stop_soon(self) -> None:
        """End the run before the next instruction; callable from any thread."""
        self._overdue = True

    def _count(self, _engine: int, address: int, _size: int, _data: int) -> None:
        if self._overdue:
            self._overdue = False
            self._hooks.stop(Trap(TrapKind.BUDGET, address))
            return
        if self._within is not None and not self._within(address):
            self._within = None
            self._hooks.stop(Trap(TrapKind.PREEMPTED, address))
        if self._left:
            self._left -= 1
            if self._left:
                return
            if all(may_end() for may_end in self.may_end):
                self._hooks.stop(Trap(TrapKind.PREEMPTED, address))
            else:
                self._left = 1
