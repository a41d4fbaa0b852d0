"""The file `trigger`, read in pieces."""

from __future__ import annotations

from functools import partial

from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.trigger import Trigger, TriggerKind
from emulated_kernel.trace.ring.trace_entry import RawEntry
from emulated_kernel.vfs.core.seq_file import SeqReader
from tests.trace.trigger.control import TriggerKernel

TRIGGERS = 500


class _Counted(Trigger):
    """A trigger that counts how often it is shown."""

    kind = TriggerKind.STACKTRACE

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.shown = 0

    def fire(self, hit: ProbeHit, entry: RawEntry | None) -> None:
        pass

    def show(self) -> str:
        self.shown += 1
        return f"trigger {self.number}"


def test_a_read_renders_only_the_lines_that_it_returns() -> None:
    """A read in pieces renders each trigger at most twice: the last line of a piece may be rendered again for
    the next piece.
    """
    kernel = TriggerKernel()
    kernel.define("p:a vfs_read\n")
    event = kernel.event("a")
    triggers = [_Counted(number) for number in range(TRIGGERS)]
    kernel.triggers.file(event).triggers += triggers
    reader = SeqReader(partial(kernel.triggers.records, event))
    text = b""
    while piece := reader.read(100, len(text)):
        text += piece
    assert text.decode().splitlines() == [f"trigger {number}" for number in range(TRIGGERS)]
    assert max(trigger.shown for trigger in triggers) <= 2
