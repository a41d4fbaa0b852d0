"""trace_pipe: what a read returns, when a read waits, and the end of the file."""

from __future__ import annotations

import errno
import re
import threading
from functools import partial

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.array.raw_pipe import RawPipe
from emulated_kernel.trace.array.trace_pipe import TracePipe
from emulated_kernel.util.errors import KernelError, WouldBlock
from tests.fuse.harness import PATIENCE

from .conftest import Bench


def texts(data: bytes) -> list[str]:
    return re.findall(r": ev: (\w+)", data.decode())


def test_reading_consumes(bench: Bench) -> None:
    bench.record("b", 2000, cpu=1)
    bench.record("a", 1000)
    pipe = TracePipe(bench.array)
    assert pipe.read(65536) == (
        b"         python3-117     [000] .....     0.000001: ev: a\n"
        b"         python3-117     [001] .....     0.000002: ev: b\n"
    )
    assert bench.lines() == []
    assert "read events: 1\n" in bench.array.stats_text(0)


def test_what_size_cuts_off_comes_later(bench: Bench) -> None:
    for n in range(3):
        bench.record(f"n{n}", n * 1000)
    pipe = TracePipe(bench.array)
    first = pipe.read(10)
    assert len(first) == 10
    assert len(bench.array.buffers[0]) == 2
    whole = first + b"".join(pipe.read(33) for _ in range(6))
    assert texts(whole) == ["n0", "n1", "n2"]
    assert pipe.read(0) == b""


def test_a_read_gives_4095_bytes_at_most_in_whole_lines(bench: Bench) -> None:
    for n in range(90):
        bench.record(f"n{n:03}", n * 1000)
    pipe = TracePipe(bench.array)
    reads = [pipe.read(65536), pipe.read(65536)]
    line = len(reads[0].splitlines(keepends=True)[0])
    assert len(reads[0]) == 4095 // line * line
    assert texts(b"".join(reads)) == [f"n{n:03}" for n in range(90)]


def test_small_reads_stop_at_the_line_that_fills_them(bench: Bench) -> None:
    for n in range(9):
        bench.record(f"n{n}", n * 1000)
    pipe = TracePipe(bench.array)
    pipe.read(100)
    assert len(bench.array.buffers[0]) == 7


def test_lost_events_are_told_of(one_cpu: Bench) -> None:
    for n in range(13):
        one_cpu.record(f"n{n}" + "x" * 994, n)
    pipe = TracePipe(one_cpu.array)
    text = pipe.read(65536)
    lost = int(re.match(rb"CPU:0 \[LOST (\d+) EVENTS\]\n", text)[1])  # type: ignore[index]
    while len(one_cpu.array.buffers[0]):
        text += pipe.read(65536)
    assert text.count(b"LOST") == 1
    assert lost + len(texts(text)) == 13


def test_too_long_a_line_is_cut(one_cpu: Bench) -> None:
    one_cpu.record("x" * 4060, 1)
    one_cpu.record("y", 2)
    assert TracePipe(one_cpu.array).read(65536) == (
        b"         python3-117     [000] .....     0.000000: [LINE TOO BIG]\n"
        b"         python3-117     [000] .....     0.000000: ev: y\n"
    )


def test_an_empty_pipe_waits(bench: Bench) -> None:
    pipe = TracePipe(bench.array)
    with pytest.raises(WouldBlock):
        pipe.read(10)
    bench.record("x", 1)
    assert texts(pipe.read(4096)) == ["x"]
    with pytest.raises(WouldBlock):
        pipe.read(10)


def test_the_end_is_where_tracing_is_off_and_something_was_read(bench: Bench) -> None:
    pipe = TracePipe(bench.array)
    bench.array.set_tracing_on(False)
    with pytest.raises(WouldBlock):
        pipe.read(10)
    bench.array.set_tracing_on(True)
    bench.record("x", 1)
    bench.array.set_tracing_on(False)
    assert texts(pipe.read(4096)) == ["x"]
    assert pipe.read(4096) == b""


def test_a_closed_pipe_is_at_its_end(bench: Bench) -> None:
    pipe = TracePipe(bench.array)
    bench.record("x", 1)
    pipe.close()
    assert pipe.read(4096) == b""
    assert len(bench.lines()) == 1


def test_a_nonblocking_reader_never_sees_an_end(bench: Bench) -> None:
    pipe = TracePipe(bench.array)
    bench.record("x", 1)
    pipe.read(4096)
    bench.array.set_tracing_on(False)
    with pytest.raises(WouldBlock):
        pipe.read(10, nonblock=True)
    assert pipe.read(10) == b""


def test_the_tracer_stays_while_a_pipe_is_open(kernel: Kernel) -> None:
    array = kernel.trace
    for open_pipe in (partial(TracePipe, array), partial(RawPipe, array, 0)):
        pipe = open_pipe()
        array.set_tracer("nop")
        with pytest.raises(KernelError) as caught:
            array.set_tracer("function")
        assert (caught.value.errno, array.current_tracer) == (errno.EBUSY, "nop")
        pipe.close()
        pipe.close()
        array.set_tracer("function")
        assert array.current_tracer == "function"
        array.set_tracer("nop")


@pytest.mark.parametrize(
    ("first", "second", "busy"), [(None, None, 1), (None, 0, 1), (0, None, 1), (0, 0, 1), (0, 1, 0)]
)
def test_one_reader_at_a_time(bench: Bench, first: int | None, second: int | None, busy: bool) -> None:
    pipe = TracePipe(bench.array, first)
    if busy:
        with pytest.raises(KernelError) as caught:
            TracePipe(bench.array, second)
        assert caught.value.errno == errno.EBUSY
    else:
        TracePipe(bench.array, second).close()
    pipe.close()
    pipe.close()
    TracePipe(bench.array, second)
    assert len(bench.array.listeners) == 1


def test_one_cpus_pipe(bench: Bench) -> None:
    bench.record("other", 1, cpu=0)
    bench.record("mine", 2, cpu=1)
    assert texts(TracePipe(bench.array, 1).read(4096)) == ["mine"]
    assert len(bench.lines()) == 1


def test_options_apply_at_the_time_of_reading(bench: Bench) -> None:
    pipe = TracePipe(bench.array)
    bench.record("x", 1000)
    bench.array.options.set("context-info", 0)
    assert pipe.read(4096) == b"ev: x\n"


def test_ready(bench: Bench) -> None:
    pipe = TracePipe(bench.array)
    assert not pipe.ready()
    bench.record("x", 1)
    assert pipe.ready()
    pipe.read(4096)
    assert not pipe.ready()
    bench.array.options.set("block", 1)
    assert pipe.ready()


def test_one_cpus_pipe_is_ready_when_buffer_percent_is_full(bench: Bench) -> None:
    bench.array.resize_buffer(16)
    pipe = TracePipe(bench.array, 0)
    for n in range(4):
        bench.record("x" * 1000, n)
    assert not pipe.ready()
    bench.array.set_buffer_percent(0)
    assert pipe.ready()
    bench.array.set_buffer_percent(50)
    for n in range(4, 9):
        bench.record("x" * 1000, n)
    assert pipe.ready()


def test_subscribers_hear_once(bench: Bench) -> None:
    heard: list[str] = []
    pipe = TracePipe(bench.array)
    pipe.subscribe(lambda: heard.append("data"))
    assert heard == []
    bench.record("x", 1)
    bench.record("y", 2)
    assert heard == ["data"]
    pipe.subscribe(lambda: heard.append("at once"))
    pipe.read(4096)
    pipe.subscribe(lambda: heard.append("off"))
    bench.array.set_tracing_on(False)
    pipe.subscribe(lambda: heard.append("closed"))
    pipe.close()
    assert heard == ["data", "at once", "off", "closed"]


def test_wait_returns_when_data_comes(bench: Bench) -> None:
    pipe = TracePipe(bench.array)
    with pytest.raises(WouldBlock):
        pipe.read(1)
    writer = threading.Timer(0.02, bench.record, ("x", 1))
    writer.start()
    pipe.wait(PATIENCE)
    writer.join()
    assert texts(pipe.read(4096)) == ["x"]
