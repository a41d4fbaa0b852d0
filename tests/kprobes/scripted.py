"""A stand-in for the scheduler's grace period, whose answers a test sets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.quiescence import GracePeriod, Span


class ScriptedGracePeriod(GracePeriod):
    """Reports that no task is in any range, and that no time passes, until a test sets other answers."""

    def __init__(self) -> None:
        self.now = 0
        self.turns = 0
        """Number of times that the tasks have got the CPU."""
        self.occupied_of: Callable[[Sequence[Span]], Collection[Span]] = lambda _spans: ()
        self.quiescent_in: Callable[[Sequence[Span]], bool] = lambda _spans: True

    def jiffies(self) -> int:
        return self.now

    def tasks(self) -> Iterable[int]:
        return ()

    def in_use_ranges(self, spans: Sequence[Span]) -> Collection[Span]:
        return self.occupied_of(spans)

    def is_quiescent(self, spans: Sequence[Span]) -> bool:
        return self.quiescent_in(spans)

    def yield_to_tasks(self) -> None:
        self.turns += 1

    def frozen(self) -> AbstractContextManager[bool]:
        return nullcontext(True)


class _InPart(ScriptedGracePeriod):
    """A scripted scheduler that gives the answers of a kernel's own scheduler until a test changes them."""

    def __init__(self, real: GracePeriod) -> None:
        super().__init__()
        self._real = real
        self.now = -1
        self.occupied_of, self.quiescent_in = real.in_use_ranges, real.is_quiescent

    def jiffies(self) -> int:
        return self._real.jiffies() if self.now < 0 else self.now

    def yield_to_tasks(self) -> None:
        super().yield_to_tasks()
        self._real.yield_to_tasks()

    def frozen(self) -> AbstractContextManager[bool]:
        return self._real.frozen()


def script(kernel: Kernel) -> ScriptedGracePeriod:
    """Replace the scheduler that the optimizer and the garbage of a kernel ask; return the new one."""
    kprobes = kernel.kprobes
    scripted = _InPart(kprobes.garbage._scheduler)
    askers: list[Any] = [kprobes.garbage, kprobes.garbage.work]
    if kprobes.optimizer is not None:
        askers += [kprobes.optimizer, kprobes.optimizer.work]
    for asker in askers:
        asker._scheduler = scripted
    return scripted
