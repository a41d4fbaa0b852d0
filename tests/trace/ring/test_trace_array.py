"""Trace arrays: recording, buffer sizes, markers, clocks, tracers, listeners and names of tasks."""

from __future__ import annotations

import errno
import struct

import pytest

from emulated_kernel.arch.x86.arch import I386
from emulated_kernel.trace.array.trace_array import TraceArray
from emulated_kernel.trace.ring.trace_entry import TRACE_ENTRY, EntryType, stack_entry
from emulated_kernel.util.errors import KernelError

from .conftest import Bench, Symbols, TextEvent, make_bench


def failure(call: object, *args: object) -> int | None:
    with pytest.raises(KernelError) as caught:
        call(*args)  # type: ignore[operator]
    return caught.value.errno


def test_events_of_all_cpus_come_in_the_order_of_time(bench: Bench) -> None:
    for ns, cpu in ((3000, 0), (1000, 1), (2000, 1), (2000, 0)):
        bench.record(f"{ns}/{cpu}", ns, cpu=cpu)
    # Records of a CPU keep their order even if the CPU's clock went back.
    assert [line.rpartition(" ")[2] for line in bench.lines()] == ["1000/1", "2000/1", "3000/0", "2000/0"]
    assert [line.split()[1] for line in bench.lines(1)] == ["[001]", "[001]"]


def test_a_record_starts_with_its_trace_entry(bench: Bench) -> None:
    bench.array.append(1400, b"payload!", cpu=0, pid=-5, flags=0x48, preempt_count=0xFF, timestamp_ns=1)
    [(_, record)] = list(bench.array.buffers[0])
    assert TRACE_ENTRY.unpack_from(record) == (1400, 0x48, 0xFF, -5)
    assert record[8:] == b"payload!"


def test_unknown_event_type(bench: Bench) -> None:
    bench.record("gone", 1000, event=1500)
    assert bench.lines()[0].endswith(": Unknown type 1500")


def test_bytes_that_are_no_utf8_pass_through(bench: Bench) -> None:
    text = b"\xff\x80 \xc3\xa9".decode("utf-8", "surrogateescape")
    bench.record(text, 1000)
    assert bench.lines()[0].encode("utf-8", "surrogateescape").endswith(b": ev: \xff\x80 \xc3\xa9")


def test_too_long_a_line(bench: Bench) -> None:
    bench.record("x" * 4030, 1000)
    bench.record("x" * 4060, 2000)
    first, second = bench.lines()
    assert first.endswith("xxx")
    assert second.endswith("0.000002: [LINE TOO BIG]")


def test_tracing_off_records_and_counts_nothing(bench: Bench) -> None:
    bench.array.set_tracing_on(False)
    assert not bench.record("x", 1)
    assert not bench.array.tracing_on
    bench.array.set_tracing_on(True)
    assert bench.record("y", 2)
    assert "dropped events: 0\n" in bench.array.stats_text(0)
    assert len(bench.lines()) == 1


def test_option_overwrite_off_drops_new_events(one_cpu: Bench) -> None:
    one_cpu.array.options.set("overwrite", 0)
    for n in range(40):
        one_cpu.record("x" * 1000, n)
    stats = one_cpu.array.stats_text(0)
    assert "overrun: 0\n" in stats
    assert "dropped events: 32\n" in stats


def test_cpus_that_start_late_are_told_of_once_events_were_overwritten(bench: Bench) -> None:
    bench.record("first of cpu 1", 500_000, cpu=1)
    for n in range(12):
        bench.record("x" * 1000, n * 100_000)
    note = "##### CPU 1 buffer started ####"
    lines = bench.lines()
    assert lines.count(note) == 1
    assert lines[lines.index(note) + 1].endswith("first of cpu 1")
    bench.array.options.set("annotate", 0)
    assert note not in bench.lines()


def test_clear_one_cpu_or_all(bench: Bench) -> None:
    for cpu in (0, 1):
        bench.record("x", 1, cpu=cpu)
    bench.array.clear_trace(0)
    assert [line.split()[1] for line in bench.lines()] == ["[001]"]
    bench.array.clear_trace()
    assert bench.lines() == []
    assert "entries-written: 0/0 " in bench.array.trace_text()


# -- sizes


def test_buffers_are_small_until_they_are_needed(bench: Bench) -> None:
    array = bench.array
    assert (array.buffer_size_text(), array.buffer_size_text(0)) == ("7 (expanded: 1408)\n", "7\n")
    array.expand()
    assert (array.buffer_size_text(), array.buffer_total_size_text()) == ("1410\n", "2820\n")


def test_expanding_keeps_events_and_happens_once(bench: Bench) -> None:
    bench.record("early", 1)
    bench.array.expand()
    memory = bench.array.buffers[0]
    bench.array.expand()
    assert bench.array.buffers[0] is memory
    assert len(bench.lines()) == 1


def test_instances_have_full_buffers_at_once() -> None:
    system = make_bench(cpus=1).array.system
    array = TraceArray(system, expanded=True)
    # Linux: the text has both sizes until the top array is used.
    assert array.buffer_size_text() == "1410 (expanded: 1408)\n"
    TraceArray(system).expand()
    assert array.buffer_size_text() == "1410\n"


@pytest.mark.parametrize(("kb", "shown"), [(1, "7\n"), (8, "11\n"), (64, "67\n"), (4096, "4099\n")])
def test_resize(bench: Bench, kb: int, shown: str) -> None:
    bench.record("kept", 1)
    bench.array.resize_buffer(kb)
    assert bench.array.buffer_size_text() == shown
    assert len(bench.lines()) == 1
    # A buffer with a chosen size is not expanded.
    bench.array.expand()
    assert bench.array.buffer_size_text() == shown


def test_resize_one_cpu(bench: Bench) -> None:
    bench.array.resize_buffer(64, 1)
    assert bench.array.buffer_size_text() == "X\n"
    assert (bench.array.buffer_size_text(0), bench.array.buffer_size_text(1)) == ("7\n", "67\n")
    assert bench.array.buffer_total_size_text() == "74\n"


def test_resize_errors(bench: Bench) -> None:
    assert failure(bench.array.resize_buffer, 0) == errno.EINVAL
    bench.record("kept", 1)
    assert failure(bench.array.resize_buffer, 1 << 40) == errno.ENOMEM
    assert len(bench.lines()) == 1


def test_free_buffer(bench: Bench) -> None:
    bench.array.expand()
    bench.array.free_buffer()
    assert bench.array.buffer_size_text() == "7\n"
    assert bench.array.tracing_on
    bench.array.options.set("disable_on_free", 1)
    bench.array.free_buffer()
    assert not bench.array.tracing_on


# -- markers


def test_marker(bench: Bench) -> None:
    """Markers are recorded as written, up to a NUL. A task has no name in records until an event has recorded
    the name.
    """
    bench.clock.ns = 1_234_567_890
    assert bench.array.write_marker(b"hello") == 5
    assert bench.array.write_marker(b"two\nlines\n") == 10
    assert bench.array.write_marker(b"a\0b") == 3
    assert bench.array.write_marker(b"") == 0
    assert bench.array.trace_text().partition("  |         |\n")[2] == (
        "           <...>-117     [001] .....     1.234568: tracing_mark_write: hello\n"
        "           <...>-117     [001] .....     1.234568: tracing_mark_write: two\nlines\n"
        "           <...>-117     [001] .....     1.234568: tracing_mark_write: a"
    )
    bench.array.event_switched(TextEvent("ev"), enabled=True)
    bench.array.write_marker(b"named")
    assert bench.lines()[-1].startswith("         python3-117 ")


def test_long_markers_are_taken_in_part(bench: Bench) -> None:
    assert bench.array.write_marker(b"x" * 2000) == 1024
    assert bench.lines()[0].endswith(": " + "x" * 1024)


def test_marker_errors(bench: Bench) -> None:
    bench.array.set_tracing_on(False)
    assert failure(bench.array.write_marker, b"x") == errno.EBADF
    assert failure(bench.array.write_raw_marker, b"xxxx") == errno.EBADF
    bench.array.options.set("markers", 0)
    assert failure(bench.array.write_marker, b"x") == errno.EINVAL
    assert failure(bench.array.write_raw_marker, b"xxxx") == errno.EINVAL


def test_raw_marker(bench: Bench) -> None:
    assert bench.array.write_raw_marker(struct.pack("<I", 0x2A) + b"\x01\xff\x00\x10") == 8
    for more in (0, 9, 12, 13):
        bench.array.write_raw_marker(bytes(4 + more))
    dumps = [line.split(" buf: ")[1].split() for line in bench.lines()]
    assert dumps[0] == ["01", "ff", "00", "10", *["00"] * 12]
    assert [len(dump) for dump in dumps] == [16, 16, 16, 16, 20]
    assert bench.lines()[0].split(": ", 1)[1].startswith("# 2a buf: ")
    for size in (0, 3, 3073):
        assert failure(bench.array.write_raw_marker, bytes(size)) == errno.EINVAL
    assert bench.array.write_raw_marker(bytes(3072)) == 1024


def test_markers_alone(bench: Bench) -> None:
    bench.array.write_marker(b"hello")
    bench.array.options.set("printk-msg-only", 1)
    assert bench.lines() == ["hello"]
    bench.array.options.set("printk-msg-only", 0)
    bench.array.options.set("raw", 1)
    assert bench.lines() == ["117 1 0 # c11b21b0 hello"]


def test_stack_trace(bench: Bench) -> None:
    callers = [Symbols.ranges[0][0] + 9, 0xFFFFFFFFC02190C8, Symbols.ranges[1][0]]
    bench.array.append(EntryType.STACK, stack_entry(callers), cpu=0, pid=117, timestamp_ns=1)
    text = bench.array.trace_text()
    assert text.endswith(": <stack trace>\n => vfs_mkdir\n => 0xffffffffc02190c8\n => ktgt_add\n")
    bench.array.options.set("sym-offset", 1)
    assert bench.array.trace_text().endswith(
        " => vfs_mkdir+0x9/0x140\n => 0xffffffffc02190c8\n => ktgt_add+0x0/0x10 [ktgt]\n"
    )


# -- clock and tracer


def test_another_clock_clears_the_buffers(bench: Bench) -> None:
    bench.record("x", 1)
    bench.array.set_clock("mono")
    assert bench.lines() == []
    assert bench.array.clock_text().split()[5] == "[mono]"
    assert failure(bench.array.set_clock, "bogus") == errno.EINVAL
    assert bench.array.clock.name == "mono"


def test_clock_units(bench: Bench) -> None:
    shown = {}
    for name in ("global", "uptime", "x86-tsc", "counter"):
        bench.array.set_clock(name)
        bench.record("x", 2_500_000_000)
        shown[name] = bench.lines()[0].split()[3]
    assert shown == {"global": "2.500000:", "uptime": "250:", "x86-tsc": "2500000000:", "counter": "2:"}
    assert "now ts: 3\n" in bench.array.stats_text(0)


def test_tracers(bench: Bench) -> None:
    bench.array.set_tracer("nop")
    assert bench.array.current_tracer == "nop"
    assert failure(bench.array.set_tracer, "bogus") == errno.EINVAL


def test_buffer_percent(bench: Bench) -> None:
    bench.array.set_buffer_percent(100)
    assert failure(bench.array.set_buffer_percent, 101) == errno.EINVAL
    assert bench.array.buffer_percent == 100


# -- listeners and tasks


def test_listeners_hear_of_data_and_of_tracing_off(bench: Bench) -> None:
    heard: list[int] = []
    bench.array.listeners.append(lambda: heard.append(len(bench.array.buffers[0])))
    bench.record("x", 1)
    bench.array.set_tracing_on(False)
    bench.record("y", 2)
    assert heard == [1, 1]


def test_task_names_are_remembered_as_the_options_say(bench: Bench) -> None:
    bench.array.options.set("record-cmd", 0)
    bench.record("x", 1, pid=7)
    bench.array.options.set("record-cmd", 1)
    bench.record("x", 2, pid=8)
    bench.record("x", 3, pid=0)
    bench.array.options.set("record-tgid", 1)
    assert [line.split()[0] for line in bench.lines()] == ["<...>-7", "python3-8", "<idle>-0"]
    assert "(-------)" in bench.lines()[1]
    bench.record("x", 4, pid=8)
    assert ["python3-8       (      8) [000]" in line for line in bench.lines()] == [False, True, False, True]


def test_verbose_latency_lines() -> None:
    bench = make_bench(cpus=1)
    bench.record("x", 1_000_000, flags=0x48, preempt_count=0xFF)
    bench.record("y", 3_500_000)
    for option in ("latency-format", "verbose"):
        bench.array.options.set(option, 1)
    assert bench.lines() == [
        "         python3     117   0 72 0000000f 00000000 [000003e8] 1.000ms (+2.500ms): ev: x",
        "         python3     117   0 0 00000000 00000001 [00000dac] 3.500ms (+0.000ms): ev: y",
    ]
    bench.array.clear_trace()
    assert bench.array.trace_text() == "# tracer: nop\n#\n"


def test_a_32_bit_guest() -> None:
    bench = make_bench(cpus=1, arch=I386())
    bench.array.write_marker(b"hello")
    callers = stack_entry([0xC1001234], word_size=4)
    bench.array.append(EntryType.STACK, callers, cpu=0, pid=117, timestamp_ns=1)
    assert bench.array.trace_text().endswith(" => 0xc1001234\n")
    bench.array.options.set("sym-addr", 1)
    assert "tracing_mark_write <c11b21b0>: hello\n" in bench.array.trace_text()
