"""The record of removed and cleared histograms."""

from __future__ import annotations

from emulated_kernel.trace.hist.services import MAX_REMOVED
from tests.trace.events.kernel import Hit
from tests.trace.trigger.control import TriggerKernel


def kernel_with_probes() -> TriggerKernel:
    made = TriggerKernel()
    made.define("p:a vfs_read n=%di:u32\n", "p:b vfs_write n=%di:u32\n")
    return made


def recorded(kernel: TriggerKernel) -> list[tuple[str, str, int]]:
    return [(hist["event"], hist["trigger"], hist["hits"]) for hist in kernel.system.removed]


def test_the_most_hits_of_a_histogram_are_recorded() -> None:
    """A histogram that is removed or cleared several times is recorded once, with its highest count."""
    kernel = kernel_with_probes()
    line = "hist:keys=n:vals=hitcount:sort=hitcount:size=2048"
    for hits in (1, 3, 2):
        kernel.write("hist:keys=n")
        for _ in range(hits):
            kernel.hit(Hit(), di=1)
        kernel.write("hist:keys=n:pause")
        kernel.write("!hist:keys=n")
    assert recorded(kernel) == [("kprobes/a", line, 3)]
    kernel.write("hist:keys=n if n > 0")
    kernel.hit(Hit(), di=1)
    kernel.write("hist:keys=n:clear if n > 0")
    assert recorded(kernel)[1:] == [("kprobes/a", f"{line} if n > 0", 1)]


def test_events_that_share_a_histogram_are_recorded_both() -> None:
    kernel = kernel_with_probes()
    for event in ("a", "b"):
        kernel.write("hist:name=x:keys=n", event)
    kernel.hit(Hit(), di=1)
    counted = sum("Hits: 0" not in kernel.hist(event) for event in ("a", "b"))
    for event in ("a", "b"):
        kernel.write("!hist:name=x:keys=n", event)
    assert [event for event, _, _ in recorded(kernel)] == ["kprobes/a", "kprobes/b"]
    assert sum(bool(hits) for _, _, hits in recorded(kernel)) == counted == 2


def test_too_many_removed_histograms() -> None:
    kernel = kernel_with_probes()
    for number in range(MAX_REMOVED + 1):
        assert not kernel.system.removed.has_forgotten
        kernel.write(f"hist:keys=n if n != {number}")
        kernel.write(f"!hist:keys=n if n != {number}")
    assert kernel.system.removed.has_forgotten
    assert len(recorded(kernel)) == MAX_REMOVED
