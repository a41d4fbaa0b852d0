"""Builder of handler programs: the common path is straight-line code, and rare paths are placed after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from emulated_kernel.arch.program.ir import CallHost, Jump, Label, Op, Place, Program

HostAction = Callable[[], bool]
"""Function that the host runs for a CallHost op.

Its result selects where control continues: after the op if True, at the op's label if False.
"""


class EntryKind(Enum):
    """How control enters a handler program."""

    BREAKPOINT = auto()
    """By a breakpoint: the handler of its trap sets the ip to the start of the program."""
    JUMP = auto()
    """By the jump of an optimized probe, without a trap."""
    CALL = auto()
    """By a call instruction at the probed address. On x86, the return address is on the stack."""
    RETURN = auto()
    """By the return trampoline; sp points at the word that holds the real return address."""


class ProgramBuilder:
    """Collects the ops of all handlers at a probed address into one program."""

    def __init__(self) -> None:
        self._hot: list[Op] = []
        self._cold: list[Op] = []
        self._into = self._hot
        self._labels = 0
        self.actions: list[HostAction] = []
        """Actions of the host calls, indexed by CallHost.number."""

    def label(self) -> Label:
        """Return a new label that has no position yet."""
        self._labels += 1
        return Label(self._labels)

    def emit(self, *ops: Op) -> None:
        """Append ops at the current position."""
        self._into += ops

    def place(self, label: Label) -> None:
        """Define the position of a label as the current one."""
        self._into.append(Place(label))

    @contextmanager
    def out_of_line(self) -> Iterator[Label]:
        """Place the ops emitted in this context after the main program, at the label that `with` yields.

        The ops must end in a jump. Contexts may be nested: the ops of an inner context are placed separately.
        """
        outer = self._into
        self._into = []
        label = self.label()
        self.place(label)
        try:
            yield label
        finally:
            self._cold += self._into
            self._into = outer

    def call_host(self, action: HostAction, on_false: Label) -> None:
        """Emit a host call of `action`; if it returns False, control goes to `on_false`."""
        self.emit(CallHost(len(self.actions), on_false))
        self.actions.append(action)

    def program(self) -> Program:
        """Return the complete program. Nothing may be emitted afterwards."""
        assert self._into is self._hot, "within a part out of line"
        if not self._cold:
            return tuple(self._hot)
        end = self.label()
        return (*self._hot, Jump(end), *self._cold, Place(end))
