"""PatchStages: stops the change of a jump after each step of patching, so that users can see the text."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.quiescence import DelayedWork, GracePeriod
from emulated_kernel.machine.text.text_poke import PokeStep, TextPoker
from emulated_kernel.util.fast_dataclass import dataclass

_REVERSED = {PokeStep.BREAKPOINT: PokeStep.TAIL, PokeStep.TAIL: PokeStep.BREAKPOINT}
"""Step that a change wrote last -> step of the reverse change that leaves the same text."""


@dataclass(slots=True)
class _Stop:
    """A change of text that has stopped after a step."""

    insn: bytes
    """The bytes that the text has after all steps of the change."""
    step: PokeStep
    """The step after which the change has stopped."""
    due: int | None
    """Jiffy from which the next step may be written; None if a user has to ask for it."""


class PatchStages:
    """The changes of jumps that have stopped after a step, and the delay after which they continue."""

    def __init__(
        self, poker: TextPoker, scheduler: GracePeriod, finished: Callable[[AggrKprobe], None]
    ) -> None:
        """Create the object with stops switched off. `finished` is called after the last step of a change."""
        self._poker = poker
        self._scheduler = scheduler
        self._finished = finished
        self.is_on = False
        """Whether changes of jumps stop after each step."""
        self.delay: int | None = None
        """Number of jiffies after which a stopped change continues by itself; None: only by go_on()."""
        self._stops: dict[AggrKprobe, _Stop] = {}
        self.work = DelayedWork(self._go_on_if_due, scheduler)

    def __len__(self) -> int:
        return len(self._stops)

    def __contains__(self, head: AggrKprobe) -> bool:
        """Return True if a change of the probe's jump has stopped."""
        return head in self._stops

    def step(self, head: AggrKprobe) -> PokeStep:
        """Return the step after which the change of a probe's jump has stopped.

        Raises: KeyError (no change of the probe's jump has stopped).
        """
        return self._stops[head].step

    def next_step(self, head: AggrKprobe) -> PokeStep:
        """Return the step that comes next in the change of a probe's jump.

        Raises: KeyError (no change of the probe's jump has stopped).
        """
        stop = self._stops[head]
        is_tail_next = stop.step is PokeStep.BREAKPOINT and self._poker.has_tail(stop.insn)
        return PokeStep.TAIL if is_tail_next else PokeStep.FIRST_BYTE

    def switch(self, on: bool, delay: int | None = None) -> None:
        """Switch the stops on or off. When they are switched off, complete all changes that have stopped.

        `delay`: number of jiffies after which a stopped change continues by itself; None: only go_on()
        continues it. The delay also applies to changes that have already stopped.
        """
        self.is_on = on
        self.delay = delay
        if not on:
            self.finish()
            return
        for stop in self._stops.values():
            self._wait(stop)

    def begin(self, head: AggrKprobe, insn: bytes) -> None:
        """Begin to replace the text at the probe by the bytes `insn`: write the breakpoint, and stop."""
        self._poker.write_step(PokeStep.BREAKPOINT, head.address, insn)
        self._add(head, insn, PokeStep.BREAKPOINT)

    def reverse(self, head: AggrKprobe, insn: bytes) -> None:
        """Turn a stopped change into the reverse change, whose result is the bytes `insn`; write nothing."""
        step = self._stops[head].step
        self._add(head, insn, _REVERSED[step] if self._poker.has_tail(insn) else step)

    def forget(self, head: AggrKprobe) -> None:
        """Forget the stopped change of a probe's jump, if there is one, without writing its next step."""
        self._stops.pop(head, None)

    def go_on(self) -> None:
        """Write the next step of each change that has stopped."""
        for head in [*self._stops]:
            # A hit during an earlier step may have ended the stop.
            if head in self._stops:
                self._write_next(head)

    def finish(self) -> None:
        """Write all remaining steps of each change that has stopped."""
        while self._stops:
            self.go_on()

    def _add(self, head: AggrKprobe, insn: bytes, step: PokeStep) -> None:
        stop = _Stop(insn, step, None)
        self._stops[head] = stop
        self._wait(stop)

    def _wait(self, stop: _Stop) -> None:
        stop.due = None
        if self.delay is not None:
            stop.due = self._scheduler.jiffies() + self.delay
            self.work.schedule(self.delay)

    def _write_next(self, head: AggrKprobe) -> None:
        stop = self._stops[head]
        stop.step = self.next_step(head)
        self._poker.write_step(stop.step, head.address, stop.insn)
        if stop.step is PokeStep.FIRST_BYTE:
            self.forget(head)
            self._finished(head)
        else:
            self._wait(stop)

    def _go_on_if_due(self) -> None:
        now = self._scheduler.jiffies()
        for head, stop in [*self._stops.items()]:
            if stop.due is not None and stop.due <= now and self._stops.get(head) is stop:
                self._write_next(head)
        dues = [stop.due for stop in self._stops.values() if stop.due is not None]
        if dues:
            self.work.schedule(max(min(dues) - now, 0))
