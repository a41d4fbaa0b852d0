"""Recorded trace files, printed again from records with the same times, tasks and texts."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from emulated_kernel.trace.array.trace_pipe import TracePipe
from emulated_kernel.trace.output.options import OPTION_NAMES
from emulated_kernel.trace.text.chars import bytes_to_text

from .conftest import Bench, TextEvent, make_bench

CONTEXT = re.compile(
    r"^ *(?P<comm>.{1,16})-(?P<pid>\d+) +(?:\((?P<tgid>.{7})\) )?\[(?P<cpu>\d{3})\] (?P<flags>[^ ]{5})?"
    r" +(?P<time>[\d.]+): (?P<event>\w+): (?P<text>.*)$",
    re.DOTALL,
)
KINDS = {"Z": 0x48, "z": 0x40, "H": 0x18, "h": 0x08, "s": 0x10, ".": 0}
"""Third character of a record's flags in the trace -> bits of common_flags that it stands for."""

PLAIN = [
    "trace_mixed.txt",
    "trace_module.txt",
    "trace_clock_boot.txt",
    "trace_clock_global.txt",
    "trace_clock_local.txt",
    "trace_clock_mono.txt",
    "trace_clock_counter.txt",
    "trace_clock_uptime.txt",
    "trace_clock_x86-tsc.txt",
    "trace_opt_annotate_off.txt",
    "trace_opt_irq-info_off.txt",
    "trace_opt_record-tgid_on.txt",
    "trace_opt_sym-addr_on.txt",
    "trace_opt_verbose_on.txt",
    "trace_empty.txt",
    "initial_trace",
]


def read(path: Path) -> str:
    return bytes_to_text(path.read_bytes())


def entries_of(text: str) -> list[re.Match[str]]:
    """Return the records of a trace text, as matches. A line without a context belongs to the record
    before.
    """
    joined: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith("#"):
            continue
        if CONTEXT.match(line.rstrip("\n")) or not joined:
            joined.append(line)
        else:
            joined[-1] += line
    matches = [CONTEXT.match(line.removesuffix("\n")) for line in joined]
    assert all(matches), [line for line, match in zip(joined, matches, strict=True) if not match]
    return [match for match in matches if match]


def nanoseconds(text: str, clock: str) -> int:
    """Return the time of a record in nanoseconds, for which the trace clock `clock` shows `text`."""
    if clock == "uptime":
        return int(text) * 10_000_000
    if clock in ("counter", "x86-tsc"):
        return int(text)
    seconds, _, usecs = text.partition(".")
    return int(seconds) * 1_000_000_000 + int(usecs) * 1000


def record_all(bench: Bench, matches: list[re.Match[str]]) -> None:
    numbers: dict[str, int] = {}
    for match in matches:
        number = numbers.setdefault(match["event"], 1400 + len(numbers))
        bench.events[number] = TextEvent(match["event"])
        flags = match["flags"] or "....."
        depth, migrate = (0 if c == "." else int(c, 16) for c in flags[3:])
        bench.record(
            match["text"],
            nanoseconds(match["time"], bench.array.clock.name),
            cpu=int(match["cpu"]),
            event=number,
            pid=int(match["pid"]),
            flags=KINDS[flags[2]],
            preempt_count=depth | migrate << 4,
        )


def set_up(name: str) -> Bench:
    """Return a trace array that uses the clock in the sample's name."""
    bench = make_bench()
    bench.array.expand()
    if clock := re.match(r"trace_clock_(.+)\.txt", name):
        bench.array.set_clock(clock[1])
    return bench


def text_with_option(bench: Bench, name: str) -> str:
    """Return the trace's text with the option in the sample's name. The option is set after all records were
    made.
    """
    if option := re.match(r"trace_opt_(.+)_(on|off)\.txt", name):
        bench.array.options.set(option[1], option[2] == "on")
    return bench.array.trace_text()


def with_counts(text: str, events: int) -> str:
    """Return the recorded text `text` with `events` as the number of entries.

    The recorded number can be larger, because only the first lines of some recordings were kept.
    """
    return re.sub(r"(entries-written: )\d+/\d+", rf"\g<1>{events}/{events}", text)


@pytest.mark.parametrize("name", PLAIN)
def test_trace_text_is_byte_for_byte_what_linux_printed(samples: Path, name: str) -> None:
    text = read(samples / name)
    bench = set_up(name)
    matches = entries_of(text)
    if bench.array.clock.name == "counter":
        # The choice of the clock has counted once, and each reading counts once more.
        for _ in range(int(matches[0]["time"]) - 2):
            bench.array.stats_text(0)
    record_all(bench, matches)
    assert text_with_option(bench, name) == with_counts(text, len(matches))


@pytest.mark.parametrize("cpu", [0, 1])
def test_one_cpus_file_counts_the_events_of_all(samples: Path, cpu: int) -> None:
    # The recording ends with line 20, or with an empty line.
    wanted = read(samples / f"per_cpu_cpu{cpu}_trace.txt").rstrip("\n") + "\n"
    bench = make_bench()
    bench.array.expand()
    for n in range(24):
        bench.record("", n)
    assert bench.array.trace_text(cpu).splitlines()[:12] == wanted.splitlines()[:12]
    assert len(bench.lines(cpu)) == (24 if cpu == 0 else 0)


@pytest.mark.parametrize("name", ["trace_opt_raw_on.txt", "trace_opt_hex_on.txt", "trace_opt_bin_on.txt"])
def test_formats_without_words(samples: Path, name: str) -> None:
    raw = (samples / "trace_opt_raw_on.txt").read_text().splitlines()
    bench = set_up(name)
    for line in raw:
        if match := re.fullmatch(r"(\d+) (\d+) (\d+) type: (\d+)", line):
            pid, cpu, stamp, event = map(int, match.groups())
            bench.record("", stamp, cpu=cpu, event=event, pid=pid)
    events = len(bench.array.buffers[1])
    wanted = with_counts(read(samples / name), events)
    written = text_with_option(bench, name)
    assert events > 20
    # The recordings have different lengths.
    length = min(len(wanted), len(written))
    assert written[:length] == wanted[:length]


def test_latency_format(samples: Path) -> None:
    text = read(samples / "trace_opt_latency-format_on.txt")
    times = read(samples / "trace_opt_raw_on.txt")
    stamps = [int(m) for m in re.findall(r"^\d+ \d+ (\d+) type", times, re.MULTILINE)]
    lines = re.findall(r"^ python3-117 {7}1\.{5} (\d+)us.: (\w+): (.*(?:\n\".*)?)", text, re.MULTILINE)
    bench = make_bench()
    bench.array.expand()
    count = min(len(stamps), len(lines)) - 1
    # The rounding of the lines shows when tracing began.
    shown = [int(line[0]) * 1000 for line in lines[:count]]
    bench.clock.ns = max(stamp - usecs - 499 for stamp, usecs in zip(stamps, shown, strict=False))
    bench.array.clear_trace()
    for (_, event, body), stamp in zip(lines[:count], stamps, strict=False):
        number = 1400 + len(bench.events)
        bench.events[number] = TextEvent(event)
        bench.record(body, stamp, cpu=1, event=number)
    wanted = text.replace("#77/77", f"#{count}/{count}").splitlines()
    written = text_with_option(bench, "trace_opt_latency-format_on.txt").splitlines()
    assert count > 15
    assert written[:-1] == wanted[: len(written) - 1]


def test_options_and_clock_files_at_start(samples: Path) -> None:
    array = make_bench().array
    assert array.options.text() == (samples / "initial_trace_options").read_text()
    assert array.clock_text() == (samples / "initial_trace_clock").read_text()
    assert array.buffer_size_text() == (samples / "initial_buffer_size_kb").read_text()
    assert array.buffer_total_size_text() == (samples / "initial_buffer_total_size_kb").read_text()
    assert f"{array.tracing_on:d}\n" == (samples / "initial_tracing_on").read_text()
    assert f"{array.buffer_percent}\n" == (samples / "initial_buffer_percent").read_text()
    assert f"{array.system.cmdlines.size}\n" == (samples / "initial_saved_cmdlines_size").read_text()


def test_stats_at_start(samples: Path) -> None:
    bench = make_bench()
    bench.clock.ns = 5_103_478_000
    assert bench.array.stats_text(0) == (samples / "initial_per_cpu_cpu0_stats").read_text()


def test_stats_after_half_of_the_events_were_piped(samples: Path) -> None:
    bench = make_bench()
    bench.array.expand()
    pipe = TracePipe(bench.array)
    for n in range(24):
        bench.record("x" * 60, 11_003_921_000 + n * 1000)
    while len(bench.array.buffers[0]):
        pipe.read(65536)
    for n in range(24):
        # A record has 70 bytes on average: a header of 4 bytes, 8 of trace_entry, the text and its NUL.
        bench.record("x" * (53 if n % 2 else 61), 11_013_731_000 + n * 1000)
    bench.clock.ns = 11_017_491_000
    written = bench.array.stats_text(0).splitlines()
    wanted = (samples / "per_cpu_cpu0_stats.txt").read_text().splitlines()
    assert [line for line in written if "bytes" not in line] == [
        line for line in wanted if "bytes" not in line
    ]


def test_every_option_of_the_list_has_a_file(samples: Path) -> None:
    listing = (samples / "ls_tracefs_options_percpu_instances.txt").read_text()
    for name in OPTION_NAMES:
        assert re.search(rf"/options/{re.escape(name)}$", listing, re.MULTILINE), name
