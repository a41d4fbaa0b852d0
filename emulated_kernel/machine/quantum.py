"""Quantum: ends a run after a seeded number of instructions, so that another CPU can run in between."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.traps.trap import Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import CODE_CALLBACK, HOOK_CODE, Engine

_FEWEST = 1
"""Instructions; the first one of a run takes the host's answer, which an interrupt before it would lose."""


class Quantum:
    """Counts instructions, each of which costs a callback: for tests of what may happen in between.

    Where runs end depends on the seed and on what the guest executes, never on time.
    """

    def __init__(self, engine: Engine, hooks: TrapHooks, mean: int, seed: int) -> None:
        """`mean`: instructions of a run on average. Raises: ValueError (fewer than one)."""
        if mean < _FEWEST:
            raise ValueError(f"a quantum of {mean} instructions")
        self._hooks = hooks
        self._longest = 2 * mean - _FEWEST
        self._dice = Random(seed)
        self._left = 0
        self._within: Callable[[int], bool] | None = None
        self._overdue = False
        self.may_end: list[Callable[[], bool]] = []
        """See Machine.preempt_if."""
        engine.add_hook(HOOK_CODE, CODE_CALLBACK(self._count))
        # A stop in the hook, in front of an instruction, has to be seen there.
        engine.stop_between_blocks(False)
        engine.flush_code()

    def arm(self, within: range | None = None) -> None:
        """The run that follows may be ended, and is at the first instruction that isn't within."""
        self._within = None if within is None else within.__contains__
        # It ends in front of the one behind its last.
        self._left = self._dice.randint(_FEWEST, self._longest) + 1

    def disarm(self) -> None:
        """Runs of the host's own are left alone."""
        self._left = 0
        self._within = None

    def arm_behind(self, within: Callable[[int], bool]) -> None:
        """The run that follows is ended at the first instruction that isn't within."""
        self._within = within

    def stop_soon(self) -> None:
        """End the run in front of the next instruction; from any thread."""
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
