"""`kprobefs save`: the lines that make a new mount what another one is."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.definitions.syntax import (
    LISTS,
    chosen_word,
    escaped,
    is_command,
    saved_triggers,
    saved_words,
    setting_line,
)
from kprobefs.definitions.tracefs_files import Files

if TYPE_CHECKING:
    from emulated_kernel.vfs.trees.stats import ProbeState

VALUES = (
    "trace_clock",
    "buffer_size_kb",
    "buffer_percent",
    "saved_cmdlines_size",
    "tracing_thresh",
    "max_graph_depth",
)
"""Files of a trace array, as far as it has them, that are saved whole, in this order."""
ARMED = "kprobes/enabled"
OPTIMIZATION = "sysctl/debug/kprobes-optimization"
FTRACE = "sysctl/kernel/ftrace_enabled"
"""All three are on in a new mount."""
STATS = "kprobes/stats"
UNSWITCHED = {"pending", "gone"}
"""Modes of probes that nothing can be switched of."""
STACK_TRACER = "sysctl/kernel/stack_tracer_enabled"
"""Off in a new mount."""
NO_FILTER = "none"
REFUSED_FILTER = re.compile(r"\n(?: *\^\nparse_error: .*|Error: \(.*\))\n*\Z")
"""How the file of a filter ends that was refused: its event has none then."""


def saved(files: Files, probes: Iterable[ProbeState] | None = None) -> Iterator[str]:
    """The lines that make a new mount what the one of `files` is; what is switched on comes last.

    `probes` is what the files of thousands say, where that is known without reading them. Raises: CliError.
    """
    tracefs = files.tracefs()
    arrays = {"": _Array(files, tracefs)}
    for instance in sorted(files.directories(f"{tracefs}instances")):
        arrays[f"instances/{escaped(instance)}/"] = _Array(files, f"{tracefs}instances/{instance}/")
    yield from _switched_off(files, OPTIMIZATION)
    yield from arrays[""].lines("dynamic_events")
    for prefix, array in arrays.items():
        yield from (f"{prefix}{line}" for line in array.settings())
    yield from _options_of_tracers(files, tracefs)
    for prefix, array in arrays.items():
        yield from (f"{prefix}{line}" for line in array.switches())
    yield from _single_probes(files, arrays.values(), probes)
    for value in _content(files, STACK_TRACER):
        if value != "0":
            yield f"{STACK_TRACER} = {value}"
    yield from _switched_off(files, FTRACE)
    # Linux: a probe that is enabled while all are disarmed isn't armed with them later.
    yield from _switched_off(files, ARMED)


def _switched_off(files: Files, name: str) -> Iterator[str]:
    if _content(files, name) == ["0"]:
        yield f"{name} = 0"


@dataclass(frozen=True)
class _Array:
    """A trace array's files."""

    files: Files
    directory: str
    """"" or with a slash at its end."""

    def lines(self, name: str) -> list[str]:
        return _content(self.files, f"{self.directory}{name}")

    def settings(self) -> Iterator[str]:
        if self.lines("tracing_on") == ["0"]:
            yield "tracing_on = 0"
        for name in VALUES:
            for value in self.lines(name)[:1]:
                if value == "X":
                    yield from self._sizes()
                # "7 (expanded: 1410)" is a buffer that nobody has used yet.
                elif "(" not in value:
                    yield f"{name} = {chosen_word(value)}"
        [mask] = self.lines("tracing_cpumask")
        if int(mask.replace(",", ""), 16) + 1 != 1 << len(self.files.directories(f"{self.directory}per_cpu")):
            yield f"tracing_cpumask = {mask}"
        for name in LISTS:
            words = saved_words(name, "\n".join(self.lines(name)))
            if wanted := [word for word in words if not is_command(word)]:
                yield f"{name} = {' '.join(wanted)}"
        yield from self._of_events()

    def _of_events(self) -> Iterator[str]:
        groups = sorted(self.files.directories(f"{self.directory}events"))
        events = [
            f"events/{group}/{event}"
            for group in groups
            for event in sorted(self.files.directories(f"{self.directory}events/{group}"))
        ]
        for event in events:
            value = _text(self.files, f"{self.directory}{event}/filter").rstrip("\n")
            if value not in ("", NO_FILTER) and not REFUSED_FILTER.search(value):
                yield setting_line(f"{event}/filter", value)
        for event in events:
            for value in saved_triggers(_text(self.files, f"{self.directory}{event}/trigger")):
                yield setting_line(f"{event}/trigger", value)

    def _sizes(self) -> Iterator[str]:
        """Of buffers that differ."""
        for cpu in sorted(self.files.directories(f"{self.directory}per_cpu")):
            for value in self.lines(f"per_cpu/{cpu}/buffer_size_kb"):
                yield f"per_cpu/{cpu}/buffer_size_kb = {value}"

    def switches(self) -> Iterator[str]:
        for value in self.lines("current_tracer"):
            yield f"current_tracer = {value}"
        yield f"trace_options = {' '.join(self.lines('trace_options'))}"
        for event in sorted(word.replace(":", "/", 1) for word in self.lines("set_event")):
            if self.lines(f"events/{event}/enable")[:1] in (["1"], ["1*"]):
                yield f"events/{event}/enable = 1"
        words = saved_words("set_ftrace_filter", "\n".join(self.lines("set_ftrace_filter")))
        if commands := list(filter(is_command, words)):
            yield f"set_ftrace_filter = {' '.join(commands)}"
        if self.lines("tracing_on") == ["1"]:
            yield "tracing_on = 1"


def _single_probes(
    files: Files, arrays: Iterable[_Array], probes: Iterable[ProbeState] | None
) -> Iterator[str]:
    """Switches of probes that aren't as their events are: they stand behind those, which they go by."""
    arrays = [*arrays]
    enabled = {word.replace(":", "/", 1) for array in arrays for word in array.lines("set_event")}
    for probe in _read_probes(files) if probes is None else sorted(probes, key=lambda it: str(it["event"])):
        event = probe["event"]
        # One that is enabled for its triggers alone isn't listed.
        is_wanted = event in enabled or any(
            array.lines(f"events/{event}/enable") != ["0"] for array in arrays
        )
        lines = []
        if probe["enabled"] != is_wanted:
            lines.append(f"{STATS}/{event}/enabled = {not is_wanted:d}")
        if asked := probe["asked"]:
            lines.append(f"{STATS}/{event}/optimized = {asked}")
        if UNSWITCHED.isdisjoint(str(probe["mode"]).split("\n")):
            yield from lines


def _read_probes(files: Files) -> Iterator[ProbeState]:
    """What is needed here of each, in files of its own."""
    for group in sorted(files.directories(STATS) if files.exists(STATS) else ()):
        for event in sorted(files.directories(f"{STATS}/{group}")):
            name = f"{STATS}/{group}/{event}"
            yield {
                "event": f"{group}/{event}",
                "enabled": _text(files, f"{name}/enabled") == "1\n",
                "asked": _text(files, f"{name}/asked").strip(),
                "mode": _text(files, f"{name}/mode"),
            }


def _options_of_tracers(files: Files, tracefs: str) -> Iterator[str]:
    """Those of other tracers than the current one, which trace_options is without; all arrays share them."""
    told = set(_content(files, f"{tracefs}trace_options"))
    for name in sorted(files.names(f"{tracefs}options")):
        if told.isdisjoint((name, f"no{name}")):
            yield f"options/{name} = {files.read(f'{tracefs}options/{name}').strip()}"


def _content(files: Files, name: str) -> list[str]:
    return _text(files, name).splitlines()


def _text(files: Files, name: str) -> str:
    try:
        return files.read(name)
    except FileNotFoundError:
        return ""
