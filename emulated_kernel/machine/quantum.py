"""Quantum: preempts a CPU after a seeded number of instructions, so that another CPU can run."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from random import Random

from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.native.host_code import routine_address
from emulated_kernel.machine.native.quantum_words import QuantumWords
from emulated_kernel.machine.traps.trap import Trap, TrapKind
from emulated_kernel.machine.unicorn_engine import CODE_CALLBACK, HOOK_CODE, Engine

_MIN_QUANTUM = 1
"""Minimum number of instructions of a run.

An interrupt before the first instruction would lose the host's answer to a hypercall.
"""
_INTERRUPT = 2000
"""Maximum number of instructions that a CPU gets for an interrupt, in addition to a quantum."""


class Quantum:
    """Ends runs after a random number of instructions; for tests of several CPUs.

    A routine of the host counts the instructions, and calls Python at the end of a run. If the host has no
    routine, Python counts. The instructions at which runs end depend on the seed and on the executed
    instructions, not on time.
    """

    def __init__(self, engine: Engine, hooks: TrapHooks, mean: int, seed: int) -> None:
        """Create a Quantum that ends each run after `mean` instructions on average.

        A random generator with the seed `seed` selects the number of instructions of each run.

        Raises: ValueError (`mean` is less than one).
        """
        if mean < _MIN_QUANTUM:
            raise ValueError(f"a quantum of {mean} instructions")
        self._hooks = hooks
        self._longest = 2 * mean - _MIN_QUANTUM
        self._dice = Random(seed)
        self._within: Callable[[int], bool] | None = None
        self.may_end: list[Callable[[], bool]] = []
        """Functions that must all return True at the end of a quantum.

        If one returns False, the CPU runs one more instruction; see ProbedMachine.preempt_if.
        """
        callback = CODE_CALLBACK(self._count)
        routine = routine_address("end_quantum")
        self._words = QuantumWords(count_in_python=ctypes.cast(callback, ctypes.c_void_p).value)
        engine.add_hook(
            HOOK_CODE,
            callback if routine is None else ctypes.c_void_p(routine),
            data=ctypes.addressof(self._words),
            keep=(callback, self._words),
        )
        # A stop in the hook, which is called before an instruction, must take effect at that instruction.
        engine.stop_between_blocks(False)
        engine.flush_code()

    def arm(self, within: range | None = None) -> None:
        """Start counting the instructions of the next run.

        If `within` is given, the run also ends at the first instruction outside of this range.
        """
        self.stop_outside(None if within is None else within.__contains__)
        # The run ends before the instruction after its last one.
        self._words.left = self._dice.randint(_MIN_QUANTUM, self._longest) + 1
        if self._words.end:
            self._words.left += _INTERRUPT

    def stop_at(self, address: int) -> None:
        """End the next run when it reaches `address`, to which an interrupt returns.

        The run ends earlier if it has exceeded its usual number of instructions by _INTERRUPT.
        """
        self._words.end = address

    def disarm(self) -> None:
        """Stop counting, so that calls of guest functions by the host are not preempted."""
        self._words.left = self._words.end = 0
        self.stop_outside(None)

    def stop_outside(self, within: Callable[[int], bool] | None) -> None:
        """End the next run at the first instruction for which `within` returns False.

        If `within` is None, remove this condition.
        """
        self._within = within
        self._words.is_bounded = within is not None

    def stop_soon(self) -> None:
        """End the current run before its next instruction; callable from any thread."""
        self._words.overdue = 1

    def _count(self, _engine: int, address: int, _size: int, _data: int) -> None:
        words = self._words
        if words.overdue:
            words.overdue = 0
            self._hooks.stop(Trap(TrapKind.BUDGET, address))
            return
        if self._within is not None and not self._within(address):
            self.stop_outside(None)
            self._hooks.stop(Trap(TrapKind.PREEMPTED, address))
        if words.left:
            words.left -= 1
            if words.left and address != words.end:
                return
            if all(may_end() for may_end in self.may_end):
                self._hooks.stop(Trap(TrapKind.PREEMPTED, address))
            else:
                words.left = max(1, words.left)
