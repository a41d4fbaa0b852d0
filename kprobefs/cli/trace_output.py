"""The files that `kprobefs trace -o` writes: text, JSON, Chrome trace events, folded stacks, trace.dat."""

from __future__ import annotations

import json
import os
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from emulated_kernel.util.fast_dataclass import dataclass, field
from kprobefs.cli import trace_dat
from kprobefs.cli.raw_records import PageLayout, RawRecord, SymbolNames, parse_format, records
from kprobefs.cli.trace_records import RecordParser, text_line

READ_SIZE = 1 << 16
LAST_STACK_WORD = {(1 << 64) - 1, (1 << 32) - 1}
"""Values of the word after the last address of a recorded stack, for 64-bit and 32-bit kernels."""


@dataclass
class TraceFiles:
    """Files of the traced mount that are needed to decode or name the records."""

    tracefs: Path
    array: Path
    """Directory of the trace array that records the hits."""
    kallsyms: Path
    formats: dict[str, str] = field(default_factory=dict)
    """Group/name of each recorded event -> text of its `format` file."""
    returns: dict[str, str] = field(default_factory=dict)
    """Name of an event at a function's return -> name of the event at the entry of the same function."""
    functions: dict[str, str] = field(default_factory=dict)
    """Name of a hidden event -> name of the function whose entry or return it records."""
    hidden: set[str] = field(default_factory=set)
    """Names of the hidden events: only the output file needs them, so the user gets no records of them."""


class TraceOutput(ABC):
    """Takes the records of a trace and writes them to a file. An object is used by only one process."""

    needs_stacks = False
    needs_entries = False
    """Whether this output also needs a probe at the entry of each function whose return is probed."""
    graph_options: tuple[str, ...] = ()
    """Names of the function graph tracer's options that must be 1 to make its records complete."""

    def __init__(self, output: TextIO, files: TraceFiles) -> None:
        self.output = output
        self.files = files
        self.is_empty = True

    def prepare(self) -> None:  # noqa: B027 (most kinds need nothing)
        """Read the mount's files that are needed to decode records.

        The process that reads the records calls this method.
        """

    @abstractmethod
    def read(self, pipe: int) -> None:
        """Read the available records, which are written now or by close().

        `pipe`: descriptor of trace_pipe, which does not block.
        """

    def close(self) -> None:
        """Write the end of the output, after the last record was read. Raises: OSError."""
        self.output.flush()


class TextOutput(TraceOutput):
    """Writes the lines of trace_pipe as text."""

    def read(self, pipe: int) -> None:
        for line in _lines(pipe):
            self.is_empty = False
            self.output.write(f"{text_line(line, self.output)}\n")
        self.output.flush()


class JsonLinesOutput(TraceOutput):
    """Writes each record as a JSON object on a line of its own."""

    graph_options = ("funcgraph-abstime", "funcgraph-proc", "funcgraph-tail")
    _separator = ""

    def prepare(self) -> None:
        self._parser = RecordParser()
        for event, text in self.files.formats.items():
            self._parser.add_layout(event.rpartition("/")[2], text)

    def read(self, pipe: int) -> None:
        for line in _lines(pipe):
            self._write(self._parser.feed(line))
        self.output.flush()

    def _write(self, found: Iterator[dict[str, object]]) -> None:
        for record in found:
            self.output.write(f"{self._begin()}{json.dumps(record)}\n")
            self.is_empty = False

    def _begin(self) -> str:
        return ""

    def close(self) -> None:
        self._write(self._parser.rest())
        super().close()


class JsonOutput(JsonLinesOutput):
    """Writes the records as one JSON array with an object on each line."""

    def _begin(self) -> str:
        return "[" if self.is_empty else ","

    def close(self) -> None:
        self._write(self._parser.rest())
        self.output.write("[]\n" if self.is_empty else "]\n")
        self.output.flush()


class RawOutput(TraceOutput):
    """Keeps the ring buffer pages of all CPUs, and writes the output file after the last page was read."""

    def prepare(self) -> None:
        events = self.files.tracefs / "events"
        self.header_page = (events / "header_page").read_text()
        self.layout = PageLayout(self.header_page)
        self.ftrace = [path.read_text() for path in sorted((events / "ftrace").glob("*/format"))]
        self.pages: dict[int, list[bytes]] = defaultdict(list)
        directories = self.files.array / "per_cpu"
        self._sources = {
            int(path.name[3:]): os.open(path / "trace_pipe_raw", os.O_RDONLY | os.O_NONBLOCK)
            for path in sorted(directories.iterdir())
        }

    def read(self, pipe: int) -> None:  # noqa: ARG002 (the pages are in other files)
        """Read the available pages of each CPU's trace_pipe_raw. Nothing is read from trace_pipe."""
        for cpu, descriptor in self._sources.items():
            with suppress(BlockingIOError):
                while page := os.read(descriptor, self.layout.size):
                    self.pages[cpu].append(page)

    def records(self) -> Iterator[RawRecord]:
        """Yield the records of all CPUs, sorted by time."""
        formats = map(parse_format, [*self.files.formats.values(), *self.ftrace])
        return records(self.pages, self.layout, formats)

    def symbols(self) -> SymbolNames:
        """Return the names of the kernel's functions."""
        return SymbolNames(_text_of(self.files.kallsyms))

    def comms(self) -> dict[int, str]:
        """Return a map: pid -> name of the task, from the saved command names of the mount."""
        pairs = (line.split(" ", 1) for line in self._saved_cmdlines().splitlines())
        return {int(pid): name for pid, name in pairs}

    def _saved_cmdlines(self) -> str:
        return (self.files.tracefs / "saved_cmdlines").read_text("utf-8", "surrogateescape")


class DatOutput(RawOutput):
    """Writes a file for `trace-cmd report` and KernelShark."""

    def close(self) -> None:
        events = self.files.tracefs / "events"
        found = trace_dat.TraceDat(
            header_page=self.header_page,
            header_event=(events / "header_event").read_text(),
            ftrace=self.ftrace,
            events=self.files.formats,
            kallsyms=_text_of(self.files.kallsyms),
            printk_formats=_text_of(self.files.tracefs / "printk_formats"),
            saved_cmdlines=self._saved_cmdlines(),
            pages=[self.pages.get(cpu, []) for cpu in range(max(self._sources) + 1)],
            page_size=self.layout.size,
            word_size=self._word_size(),
        )
        self.is_empty = not any(self.pages.values())
        self.output.flush()
        with open(self.output.fileno(), "wb", closefd=False) as file:
            trace_dat.write(found, file)

    def _word_size(self) -> int:
        """Return the size in bytes of an unsigned long, which is the size of an address in a stack record."""
        formats = (parse_format(text) for text in self.ftrace)
        callers = next(each.field("caller") for each in formats if each.name == "kernel_stack")
        return callers.size // (callers.count or 1)


class FoldedOutput(RawOutput):
    """Writes folded stacks for flame graphs, each with its number of records.

    If a call graph is recorded, a stack's number is instead the time in nanoseconds that its innermost
    function spent outside of nested calls.
    """

    needs_stacks = True

    def close(self) -> None:
        symbols = self.symbols()
        comms = self.comms()
        found: Counter[str] = Counter()
        for pid, names, weight in _weighted(self.records(), symbols):
            comm = comms.get(pid, str(pid)).replace(";", ":")
            found[";".join((comm, *names))] += weight
        for stack, weight in found.items():
            self.output.write(f"{stack} {weight}\n")
        self.is_empty = not found
        super().close()


def _weighted(found: Iterator[RawRecord], symbols: SymbolNames) -> Iterator[tuple[int, list[str], int]]:
    """Yield (pid, stack, weight) for each stack record and each record of a function graph exit.

    `stack`: names of the functions, outermost first. The weight is 1 for a stack record. For a graph exit, it
    is the time in nanoseconds that the function spent outside of nested calls.
    """
    graph: dict[int, list[_OpenCall]] = defaultdict(list)
    for record in found:
        name = record.event.name
        if name == "kernel_stack":
            yield record.pid, [symbols.name(address) for address in reversed(_stack(record))], 1
        elif name == "funcgraph_entry":
            graph[record.pid].append(_OpenCall(symbols.name(_function(record)), record.time))
        elif name == "funcgraph_exit" and graph[record.pid]:
            names = [call.name for call in graph[record.pid]]
            call = graph[record.pid].pop()
            duration = record.time - call.start
            if graph[record.pid]:
                graph[record.pid][-1].children += duration
            yield record.pid, names, duration - call.children


@dataclass
class _OpenCall:
    """A call whose entry was read from the records, but whose return was not yet."""

    name: str
    start: int
    """Time of the call's entry in nanoseconds."""
    children: int = 0
    """Total duration in nanoseconds of the recorded calls that this call's function made."""


def _function(record: RawRecord) -> int:
    value = record.values["func"]
    assert isinstance(value, int)
    return value


def _stack(record: RawRecord) -> list[int]:
    """Return the addresses of a stack record, the innermost function's first."""
    callers = record.event.field("caller")
    word = callers.size // (callers.count or 1)
    number = record.event.field("size").value(record.data)
    assert isinstance(number, int)
    end = min(len(record.data), callers.offset + word * number)
    found = [
        int.from_bytes(record.data[at : at + word], "little")
        for at in range(callers.offset, end - word + 1, word)
    ]
    return [address for address in found if address and address not in LAST_STACK_WORD]


class ChromeOutput(RawOutput):
    """Writes Chrome trace events: function calls are slices, other records are marks, tasks are tracks."""

    needs_entries = True

    def close(self) -> None:
        symbols = self.symbols()
        comms = self.comms()
        events = list(_trace_events(self.records(), symbols, self.files))
        tasks = dict.fromkeys(int(str(event["tid"])) for event in events)
        named = [
            {
                "ph": "M",
                "name": "thread_name",
                "pid": pid,
                "tid": pid,
                "args": {"name": comms.get(pid, str(pid))},
            }
            for pid in tasks
        ]
        self.is_empty = not events
        # Sort by start time, and outer slices before inner ones.
        events.sort(key=lambda event: (event["ts"], -float(str(event.get("dur", 0)))))
        json.dump({"traceEvents": [*named, *events], "displayTimeUnit": "ns"}, self.output)
        self.output.write("\n")
        super().close()


def _trace_events(
    found: Iterator[RawRecord], symbols: SymbolNames, files: TraceFiles
) -> Iterator[dict[str, object]]:
    entries: dict[tuple[int, str], list[RawRecord]] = defaultdict(list)
    graph: dict[int, list[_OpenCall]] = defaultdict(list)
    closed: dict[tuple[int, str], RawRecord] = {}
    last: dict[int, dict[str, object]] = {}
    for record in found:
        name = record.event.name
        if name == "kernel_stack":
            if event := last.get(record.cpu):
                event["args"] = {
                    **_arguments(event),
                    "stack": [symbols.name(address) for address in _stack(record)],
                }
            continue
        if event := last.pop(record.cpu, None):
            yield event
        place = (record.pid, files.returns.get(name, name))
        if name == "funcgraph_entry":
            graph[record.pid].append(_OpenCall(symbols.name(_function(record)), record.time))
        elif name == "funcgraph_exit":
            if graph[record.pid]:
                call = graph[record.pid].pop()
                yield _slice(record, call.name, call.start, {})
        elif name not in files.hidden:
            entry = closed.pop(place, None) if name in files.returns else None
            if entry is None:
                last[record.cpu] = _mark(record)
            else:
                values = {**entry.values, **record.values}
                last[record.cpu] = _slice(record, files.functions[entry.event.name], entry.time, values)
        elif name not in files.returns:
            entries[place].append(record)
        elif entries[place]:
            # A hidden return event has no filter, so that each recorded entry has a return.
            closed[place] = entries[place].pop()
    yield from last.values()


def _arguments(event: Mapping[str, object]) -> dict[str, object]:
    found = event["args"]
    assert isinstance(found, dict)
    return found


def _slice(record: RawRecord, name: str, start: int, values: Mapping[str, object]) -> dict[str, object]:
    return {**_event("X", name, start, record.pid, values), "dur": (record.time - start) / 1000}


def _mark(record: RawRecord) -> dict[str, object]:
    found = _event("i", record.event.name, record.time, record.pid, record.values)
    return {**found, "s": "t"}


def _event(phase: str, name: str, time: int, pid: int, values: Mapping[str, object]) -> dict[str, object]:
    shown = {key: value for key, value in values.items() if not key.startswith("__probe_")}
    return {"ph": phase, "name": name, "pid": pid, "tid": pid, "ts": time / 1000, "args": shown}


def _text_of(path: Path) -> str:
    """Return the text of a file, or "" if the mount has no such file."""
    with suppress(OSError):
        return path.read_text()
    return ""


def _lines(pipe: int) -> Iterator[str]:
    """Yield the lines that can be read now. A read of trace_pipe returns whole lines."""
    with suppress(BlockingIOError):
        while data := os.read(pipe, READ_SIZE):
            # Not splitlines(): a name may contain its other line separators.
            yield from data.decode("utf-8", "surrogateescape").removesuffix("\n").split("\n")


def output_of(path: str | None, *, as_json: bool) -> type[TraceOutput]:
    """Return the class of the output that the ending of the file name `path` selects.

    `path`: None for standard output, which gets text. `as_json`: whether option --json is given, which
    selects lines of JSON whatever `path` is.
    """
    if as_json:
        return JsonLinesOutput
    endings: Sequence[tuple[str, type[TraceOutput]]] = (
        (".trace.json", ChromeOutput),
        (".json", JsonOutput),
        (".folded", FoldedOutput),
        (".dat", DatOutput),
    )
    return next((kind for ending, kind in endings if (path or "").endswith(ending)), TextOutput)
