"""Normalization of answers: replaces each part of a text that may legitimately differ between two kernels."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby

from stress.differential.sides import PID

# Addresses differ between kernels, and Linux hashes or hides pointers.
_ADDRESS = re.compile(
    r"0x(?:\(____ptrval____\)|[0-9a-f]{16})|\b[0-9a-f]{16}\b|ffffffff[89a-c][0-9a-f]{7}|\(____ptrval____\)"
)
_LOG_TIME = re.compile(r"^\[ *\d+\.\d+\] ", re.MULTILINE)
# Linux up to 6.1 misspells this word.
_MISSPELT = re.compile(r"\$-valiable")
_RECORD = re.compile(r"^ *(?P<comm>\S.*)-(?P<pid>\d+) +(?:\( *[\d-]+\) +)?\[\d{3}\] ")
_VERBOSE = re.compile(r"^ *(?P<comm>\S.*) +(?P<pid>\d+) +\d+ \d [0-9a-f]{8} ")
_LATENCY = re.compile(r"^ *(?P<comm>\S.*)-(?P<pid>\d+) +(?:\( *[\d-]+\) +)?\d+\S{5} +\d+us")
# Times of all clocks and formats. A position in the buffer also counts the records of other tasks.
_STAMP = re.compile(r"(?P<head>\[\d{3}\](?: \S{5})?) +[\d.]+: ")
_LATENCY_STAMP = re.compile(r"(?<=[\w.]{5} ) *\d+(?:us[ !+#*@$])?: ")
_VERBOSE_STAMP = re.compile(r"\[[0-9a-f]{8,16}\] [\d.]+(?:ms)? \(\+[\d.]+(?:ms)?\): ")
# The time of the last repetition, in a record of option func-no-repeats.
_LAST = re.compile(r"(?<=last_ts: ) *[\d.]+(?=\))")
# The kernel's release, and the number of records.
_VERSION = re.compile(r"^(# \S+ latency trace v\S+ on ).*$|^(# latency: ).*, #\d+/\d+(?=, CPU)", re.MULTILINE)
# File descriptors: all clients of the distribution's guest share one table, and the built-in guest does not
# know the descriptors of a client without a process.
_DESCRIPTOR = re.compile(r"(?<=NR 257 = )\d+$|(?<=sys_openat -> 0x)[0-9a-f]+$|(?<=\bfd: )\w+|(?<=\bfd=)\w+")
# System calls that are made for the client after an access: close(2), and lseek(2) as a test if a file is
# seekable. The driver of the client determines the time of task switches.
_OTHERS = re.compile(r": sched_\w+: |: sys_exit: NR [38] =|: sys_enter: NR [38] |: sys_(?:close|lseek)")
# The caller of a function, because compilers inline different functions.
_CALLER = re.compile(r"\([\w.]+(?:\+\(place\))?(?: <[0-9a-f]{16}>)? <- |<-[\w.]+(?:\+\(place\))?")
# Addresses of the client's data in user memory, and event ids, which depend on the order of registration.
_USER_ADDRESS = re.compile(r"(?<=\bbuf: )[0-9a-f]+|(?<=name: )[0-9a-f]+|(?<=\btype: )\d+")
# Duration and time of a call in a function graph, with the mark of a long call.
_DURATION = re.compile(r" [$@*#!+]? *\d+\.\d+ us +\|")
_GRAPH_TIME = re.compile(r"^ *\d+\.\d+ \| ")
# PID, CPU and time of records under the options raw, hex and bin.
_RAW_STAMP = re.compile(rf"({PID} \d+ )\d+ (?=#|type|[0-9a-f]{{16}} )")
_HEX_STAMP = re.compile(rf"^({PID:08x} [0-9a-f]{{8}} )[0-9a-f]{{16}} ")
_BIN_STAMP = re.compile("(" + re.escape(PID.to_bytes(8, "little").decode("latin-1")) + r")[\s\S]{8}")
# A function record under option bin has two addresses of the kernel's text and no line end.
_BIN_CALL = re.compile(r"(?:[\s\S]{4}\xff{4}){2}")
# After the data of a raw marker, the buffer has old data.
_RAW_MARKER = re.compile(r"(# [0-9a-f]+ buf: [0-9a-f]{2})((?: [0-9a-f]{2})*)")
_HIST_TIME = re.compile(r"(?<=common_timestamp: )[^,}]+")
_HIST_ADDRESS = re.compile(r"(?<=\b[tuc]: )[~ ]*\d[\d ^.-]*(?=[,}]|  )")
_HIST_CHAIN = re.compile(r"^ {9}[^{}]+\n", re.MULTILINE)
# The offset of the caller in tracing_mark_write, a function that the built-in guest does not have.
_MARK = re.compile(r"(?<=tracing_mark_write)\+\(place\)")
_CHAIN = re.compile(r"^ => ")
_SIZES = re.compile(r"^# entries-in-buffer/entries-written: .*$", re.MULTILINE)
_ID = re.compile(r"^ID: \d+$", re.MULTILINE)
_EVENT = re.compile(r"^!?([\w*?]+):([\w*?]+)$")
_SORT = re.compile(r":sort=([^: ]+)")
_PLACE = re.compile(r"\+0x[0-9a-f]+/0x[0-9a-f]+")


class Normal:
    """Rules that normalize texts, selected by the name of the file.

    `events` contains GROUP:EVENT of each static event that both kernels have.
    """

    def __init__(self, events: frozenset[str]) -> None:
        self._events = events
        self._groups = {event.partition(":")[0] for event in events}
        self._rules: dict[str, Callable[[str], str]] = {
            "error_log": self._error_log,
            "trace": self._trace,
            "trace_pipe": self._trace,
            "snapshot": self._trace,
            "format": lambda text: _ID.sub("ID: (id)", text),
            "hist": self._hist,
            "set_event": self._event_list,
            "available_events": self._event_list,
            # Linux sorts these lines by the addresses of functions.
            "set_ftrace_filter": _sorted,
            "set_ftrace_notrace": _sorted,
            "set_graph_function": _sorted,
            "set_graph_notrace": _sorted,
            "enabled_functions": lambda text: _sorted(_PLACE.sub("", text)),
        }

    def text(self, path: str, text: str) -> str:
        """Return the normalized text of the answer to an access to `path`."""
        rule = self._rules.get(path.rsplit("/", 1)[-1])
        return _ADDRESS.sub("(address)", rule(text) if rule else text)

    def _error_log(self, text: str) -> str:
        return _MISSPELT.sub("$-variable", _LOG_TIME.sub("", text))

    def _event_list(self, text: str) -> str:
        """Return a list of events without the static events that only one kernel has."""
        return "".join(line for line in text.splitlines(keepends=True) if self._is_common(line.strip()))

    def _is_common(self, line: str) -> bool:
        group = line.partition(":")[0]
        return line in self._events or group in ("kprobes", "synthetic", "eprobes", "uprobes", "k", "ftrace")

    def _trace(self, text: str) -> str:
        """Return only the records of the client in a trace, without times and sizes of functions."""
        text = _BIN_CALL.sub("(call)", _BIN_STAMP.sub(r"\1(time)", text))
        text = _VERSION.sub(r"\1\2", _SIZES.sub("#", text))
        lines = (line for line in _of_client(text.splitlines()) if not _OTHERS.search(line))
        return "\n".join(_without_numbers(line) for line in lines if not _CHAIN.match(line))

    def _hist(self, text: str) -> str:
        """Return histograms without times, addresses of strings and call chains.

        Entries with equal sort keys are sorted by their text, because their order is undefined.
        """
        text = _HIST_TIME.sub("(time)", _HIST_ADDRESS.sub("(address)", _HIST_CHAIN.sub("", text)))
        return "\n".join(line for block in _histograms(text.splitlines()) for line in _ranked(block))


def _without_numbers(line: str) -> str:
    line = _DURATION.sub("(duration) |", _GRAPH_TIME.sub("(time) | ", line))
    line = _STAMP.sub(r"\g<head> (time): ", line)
    line = _LATENCY_STAMP.sub("(time): ", _LAST.sub("(time)", line))
    line = _VERBOSE_STAMP.sub("(time): ", line)
    line = _HEX_STAMP.sub(r"\1(time) ", _RAW_STAMP.sub(r"\1(time) ", line))
    line = _RAW_MARKER.sub(lambda found: f"{found[1]} and {len(found[2]) // 3}", line)
    line = _USER_ADDRESS.sub("(number)", line)
    line = _MARK.sub("", _PLACE.sub("+(place)", line))
    return _CALLER.sub(
        lambda found: "((caller) <- " if found[0][0] == "(" else "<-(caller)",
        _DESCRIPTOR.sub("(fd)", _PLACE.sub("+(place)", line)),
    )


def _sorted(text: str) -> str:
    return "\n".join(sorted(text.splitlines()))


def _of_client(lines: list[str]) -> Iterator[str]:
    wanted = True
    for line in lines:
        record = _RECORD.match(line) or _LATENCY.match(line) or _VERBOSE.match(line)
        if line.startswith("#"):
            yield line
            continue
        if record:
            wanted = int(record["pid"]) == PID
        if wanted:
            yield line


def _histograms(lines: list[str]) -> Iterator[list[str]]:
    """Yield the lines of each histogram."""
    block: list[str] = []
    for line in lines:
        if line == "# event histogram" and block:
            yield block
            block = []
        block.append(line)
    yield block


def _ranked(lines: list[str]) -> Iterator[str]:
    info = next((line for line in lines if line.startswith("# trigger info: ")), "")
    found = _SORT.search(info)
    keys = [word.partition(".")[0] for word in found[1].split(",")] if found else ["hitcount"]
    entries = [line for line in lines if line.startswith("{")]

    def rank(line: str) -> tuple[str, ...]:
        shown = {name.strip(): value.strip() for name, value in re.findall(r"([$\w.]+): *([^,}{ ]+)", line)}
        return tuple(shown.get(key, "") for key in keys)

    ordered = iter([line for _, group in groupby(entries, rank) for line in sorted(group)])
    for line in lines:
        yield next(ordered) if line.startswith("{") else line
