"""Builds handler programs: the usual way through straight on, everything else out of line behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum, auto

from emulated_kernel.arch.program.ir import CallHost, Jump, Label, Op, Place, Program

HostAction = Callable[[], bool]
"""What the host does for a CallHost: True goes on behind it, False at its label."""


class EntryKind(Enum):
    """How a hit comes to a handler program."""

    BREAKPOINT = auto()
    """By a breakpoint, whose trap was handled and sent on."""
    JUMP = auto()
    """By the jump of an optimized probe: nothing was trapped."""
    CALL = auto()
    """By a call from the probed place, whose return address is on the stack."""
    RETURN = auto()
    """By the return trampoline: sp is at the word that is returned to in the end, the real one already."""


class ProgramBuilder:
    """Collects the ops of all handlers of an address; labels and host calls are numbered through."""

    def __init__(self) -> None:
        self._hot: list[Op] = []
        self._cold: list[Op] = []
        self._into = self._hot
        self._labels = 0
        self.actions: list[HostAction] = []
        """By CallHost.number."""

    def label(self) -> Label:
        """A place that isn't placed yet."""
        self._labels += 1
        return Label(self._labels)

    def emit(self, *ops: Op) -> None:
        """Append ops where the program is now."""
        self._into += ops

    def place(self, label: Label) -> None:
        """Define a label here."""
        self._into.append(Place(label))

    @contextmanager
    def out_of_line(self) -> Iterator[Label]:
        """What is emitted within stands behind the program, at the label; it must end in a jump.

        Within such a part, another one is put behind it.
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
        """Let the host do something, and go on at `on_false` if it says so."""
        self.emit(CallHost(len(self.actions), on_false))
        self.actions.append(action)

    def program(self) -> Program:
        """All of it. Nothing may be added afterwards."""
        assert self._into is self._hot, "within a part out of line"
        if not self._cold:
            return tuple(self._hot)
        end = self.label()
        return (*self._hot, Jump(end), *self._cold, Place(end))
