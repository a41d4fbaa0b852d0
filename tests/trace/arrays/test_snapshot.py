"""The file snapshot: records that were moved to the second buffer, as text and as raw pages."""

from __future__ import annotations

from pathlib import Path

import pytest

from emulated_kernel.trace.array.raw_pipe import RawPipe
from emulated_kernel.trace.ring.page_format import header_event_text, header_page_text
from emulated_kernel.util.errors import WouldBlock
from tests.trace.events.kernel import errno_of
from tests.trace.ring.conftest import Bench, TextEvent, make_bench, samples

__all__ = ["samples"]


@pytest.fixture
def bench() -> Bench:
    return make_bench()


def test_help_as_recorded(bench: Bench, samples: Path) -> None:
    assert bench.array.snapshot_text() == (samples / "initial_snapshot").read_text()
    assert "Not supported" in bench.array.snapshot_text(1)


def test_one_takes_it(bench: Bench) -> None:
    bench.record("before", 1000)
    bench.array.snapshot.write(1)
    bench.record("after", 2000)
    assert "before" in bench.array.snapshot_text()
    assert [line.split(": ")[-1] for line in bench.lines()] == ["after"]
    bench.array.snapshot.write(1)
    assert "after" in bench.array.snapshot_text()
    assert [line.split(": ")[-1] for line in bench.lines()] == ["before"]


def test_events_that_are_recorded_here_follow_it(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot notifies only the events that are enabled in its trace array.

    Notifying all events would be slow: a function may take thousands of snapshots a second, and thousands of
    events may exist.
    """
    told: list[TextEvent] = []

    def changed(event: TextEvent) -> None:
        told.append(event)

    monkeypatch.setattr(TextEvent, "changed", changed)
    recorded, other = TextEvent("recorded"), TextEvent("other")
    bench.array.event_switched(recorded, enabled=True)
    bench.array.event_switched(other, enabled=True)
    bench.array.event_switched(other, enabled=False)
    bench.array.snapshot.write(1)
    assert told == [recorded]


def test_two_clears_and_zero_frees(bench: Bench) -> None:
    array, snapshot = bench.array, bench.array.snapshot
    snapshot.write(2)
    assert "is freed" in array.snapshot_text()
    bench.record("x", 1000)
    snapshot.write(1)
    snapshot.write(7)
    assert "is allocated" in array.snapshot_text()
    snapshot.write(0)
    assert "is freed" in array.snapshot_text()
    assert snapshot.buffers[0].nr_pages == 2


def test_one_cpu(bench: Bench) -> None:
    for number in (0, 1):
        assert errno_of(lambda n=number: bench.array.snapshot.write(n, 0)) == "EINVAL"  # type: ignore[misc]
    bench.record("a", 1000, cpu=0)
    bench.record("b", 2000, cpu=1)
    bench.array.snapshot.write(1)
    assert "ev: b" not in bench.array.snapshot_text(0)
    bench.array.snapshot.write(2, 0)
    assert "ev: a" not in bench.array.snapshot_text()
    assert "ev: b" in bench.array.snapshot_text(1)


def test_switches_stay(bench: Bench) -> None:
    bench.array.snapshot.write(1)
    bench.array.set_tracing_on(False)
    bench.array.snapshot.write(1)
    assert not bench.record("x", 1000)
    bench.array.set_tracing_on(True)
    bench.array.set_cpumask(2)
    bench.array.snapshot.write(1)
    assert (bench.record("x", 2000, cpu=0), bench.record("y", 2000, cpu=1)) == (False, True)


def test_sizes_follow_the_buffers(bench: Bench) -> None:
    bench.array.resize_buffer(64)
    bench.array.snapshot.write(1)
    bench.array.resize_buffer(128)
    bench.array.snapshot.write(1)
    sizes = [buffer.nr_pages for buffer in (*bench.array.buffers, *bench.array.snapshot.buffers)]
    assert len(set(sizes)) == 1


def test_nothing_is_taken_while_a_reader_wants_it_still(bench: Bench) -> None:
    bench.array.options.set("pause-on-trace", 1)
    assert bench.array.pauses_for_readers
    bench.record("a", 1000)
    bench.array.stop()
    assert not bench.record("b", 2000)
    bench.array.snapshot.write(1)
    assert "is allocated" in bench.array.snapshot_text()
    bench.array.start()
    assert bench.record("b", 3000)
    bench.array.start()
    assert not bench.array.is_stopped


def test_pages_of_a_cpu(bench: Bench) -> None:
    pipe = RawPipe(bench.array, 0)
    with pytest.raises(WouldBlock):
        pipe.read(4096)
    bench.record("a", 1000)
    page = pipe.read(4096)
    assert len(page) == 4096
    assert int.from_bytes(page[:8], "little") == 1000
    assert b"a\0" in page
    bench.record("b", 2000)
    parts = [pipe.read(1000), pipe.read(0), pipe.read(4096)]
    assert [len(part) for part in parts] == [1000, 0, 3096]
    pipe.close()
    assert pipe.read(1) == b""


def test_pages_for_splice_are_those_of_read(bench: Bench) -> None:
    """Splicing returns the same pages as reading, except the page that is still being written, which only a
    read returns.
    """
    bench.array.resize_buffer(64, None)
    for n in range(1000):
        bench.record("a", 1000 + n)
    bench.array.snapshot.write(1)
    read, spliced = (RawPipe(bench.array, 0, snapshot=snapshot) for snapshot in (False, True))
    for n in range(1000):
        bench.record("a", 1000 + n)
    full_pages = bench.array.buffers[0].dirty_pages
    assert full_pages >= 2
    for _ in range(full_pages):
        assert spliced.splice_page() == read.read(4096)
    assert errno_of(spliced.splice_page) == "EAGAIN"
    assert spliced.read(100) == read.read(100)
    assert errno_of(spliced.splice_page) == "EINVAL"
    assert spliced.read(4096) == read.read(4096)
    with pytest.raises(WouldBlock):
        spliced.read(4096)
    spliced.close()
    assert errno_of(spliced.splice_page) == "EAGAIN"


def test_pages_set_aside(bench: Bench) -> None:
    pipe = RawPipe(bench.array, 0, snapshot=True)
    bench.record("a", 1000)
    with pytest.raises(WouldBlock):
        pipe.read(4096)
    bench.array.snapshot.write(1)
    assert b"a\0" in pipe.read(4096)


def test_their_layout_as_recorded(samples: Path) -> None:
    assert header_page_text() == (samples / "initial_events_header_page").read_text()
    assert header_event_text() == (samples / "initial_events_header_event").read_text()
