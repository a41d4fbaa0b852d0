"""`kprobefs save`: prints a mount's definitions and settings as lines for `kprobefs apply`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from emulated_kernel.util.control_lock import PAUSE
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.lazy_pattern import lazy_pattern
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
from kprobefs.definitions.trigger_order import by_need

if TYPE_CHECKING:
    from emulated_kernel.vfs.trees.stats import ProbeSwitches

VALUES = (
    "trace_clock",
    "buffer_subbuf_size_kb",
    "buffer_size_kb",
    "buffer_percent",
    "saved_cmdlines_size",
    "tracing_thresh",
    "max_graph_depth",
    "syscall_user_buf_size",
)
"""Names of a trace array's files whose values are saved, in this order. A missing file is skipped."""
DEFAULTS = {
    "trace_clock": ("local",),
    "buffer_subbuf_size_kb": ("4",),
    "buffer_size_kb": ("1408", "1410"),
    "buffer_percent": ("50",),
    "saved_cmdlines_size": ("128", "6552", "8190"),
    "tracing_thresh": ("0",),
    "max_graph_depth": ("0",),
    "syscall_user_buf_size": ("63",),
    "current_tracer": ("nop",),
}
"""Name of a trace array's file -> its possible values in a new mount; they depend on the kernel's version.

128 counts as a default of saved_cmdlines_size in each kernel: a kernel with a larger default rounds 128 up to
this default.
"""
DEFAULT_OPTIONS = frozenset(
    {
        "annotate",
        "context-info",
        "copy_trace_marker",
        "funcgraph-cpu",
        "funcgraph-duration",
        "funcgraph-irqs",
        "funcgraph-overhead",
        "function-trace",
        "graph-time",
        "hash-ptr",
        "irq-info",
        "markers",
        "overwrite",
        "print-parent",
        "record-cmd",
        "sleep-time",
        "trace_printk",
        "trace_printk_dest",
    }
)
"""Names of the trace options that are on in a new mount."""
AWAITED = ":mod:"
"""Text in the lines of set_event for events of modules that are not loaded."""
EVENTS_PER_STEP = 64
"""Number of events whose files are read in one step of a reboot; requests wait during a step."""
ARMED = "kprobes/enabled"
"""Path of the switch that arms all probes. In a new mount, the switch is on."""
OPTIMIZATION = "sysctl/debug/kprobes-optimization"
"""Path of the switch of the optimizer. In a new mount, the switch is on."""
FTRACE = "sysctl/kernel/ftrace_enabled"
"""Path of the switch of function tracers and of probes that use ftrace. In a new mount, the switch is on."""
STATS = "kprobes/stats"
"""Path of the directory with a subdirectory for each event, with the state and switches of its probes."""
UNSWITCHED = {"pending", "gone"}
"""Modes of probes that have no switches, because they cannot be enabled, disabled or optimized."""
STACK_TRACER = "sysctl/kernel/stack_tracer_enabled"
"""Path of the switch of the stack tracer. In a new mount, the switch is off."""
MAXACTIVE = lazy_pattern(r"r(\d+)(?=:)")
"""Matches the beginning of a line of dynamic_events that defines a return probe, up to its maxactive."""
NO_FILTER = "none"
"""Content of the filter file of an event without a filter."""
REFUSED_FILTER = lazy_pattern(r"\n(?: *\^\nparse_error: .*|Error: \(.*\))\n*\Z")
"""Matches the end of a filter file after the kernel has rejected a filter, so that the event has none."""


def saved(files: Files, default_maxactive: Callable[[], int]) -> Iterator[str]:
    """Yield the lines that give a new mount the definitions and settings of `files`.

    `default_maxactive`: see saved_in_steps(). Raises: CliError (there is no tracefs).
    """
    return filter(None, saved_in_steps(files, default_maxactive))


def saved_in_steps(
    files: Files, default_maxactive: Callable[[], int], probes: Iterable[ProbeSwitches] | None = None
) -> Iterator[str]:
    """Yield the lines that give a new mount the definitions and settings of `files`.

    Also yield PAUSE wherever the control lock may be released for a moment.

    Definitions and settings that a new mount has anyway are left out. Lines that switch something on come
    last. `default_maxactive` returns the maxactive that the kernel chooses; it is called only if a definition
    contains a maxactive. `probes`: switches of the probes, sorted by name; None: read them from the files in
    kprobes/stats, of which there may be thousands.
    Raises: CliError (there is no tracefs).
    """
    tracefs = files.tracefs()
    arrays = {"": _Array(files, tracefs)}
    for instance in sorted(files.directories(f"{tracefs}instances")):
        arrays[f"instances/{escaped(instance)}/"] = _Array(files, f"{tracefs}instances/{instance}/")
    yield from _switched_off(files, OPTIMIZATION)
    yield from _definitions(arrays[""].lines("dynamic_events"), default_maxactive)
    for prefix, array in arrays.items():
        yield PAUSE
        yield from (line and f"{prefix}{line}" for line in array.settings())
    yield from _options_of_tracers(files, tracefs)
    for prefix, array in arrays.items():
        yield PAUSE
        yield from (f"{prefix}{line}" for line in array.switches(is_instance=bool(prefix)))
    yield from _single_probes(files, arrays.values(), probes)
    for value in _content(files, STACK_TRACER):
        if value != "0":
            yield f"{STACK_TRACER} = {value}"
    yield from _switched_off(files, FTRACE)
    # The switch comes last. Linux: if a probe is enabled while all probes are disarmed, arming all probes
    # later does not arm it.
    yield from _switched_off(files, ARMED)


def _definitions(lines: Iterable[str], default_maxactive: Callable[[], int]) -> Iterator[str]:
    """Yield lines of dynamic_events, each without its maxactive if that is the kernel's default.

    The default depends on the number of CPUs, so another machine chooses its own.
    """
    default: int | None = None
    for line in lines:
        found = MAXACTIVE.match(line)
        if found is None:
            yield line
            continue
        default = default_maxactive() if default is None else default
        yield f"r{line[found.end() :]}" if int(found[1]) == default else line


def _pause(number: int) -> tuple[str, ...]:
    """Return (PAUSE,) if the event with the index `number` is the first of a step, else an empty tuple.

    For PAUSE, see saved_in_steps().
    """
    return () if number % EVENTS_PER_STEP else (PAUSE,)


def _switched_off(files: Files, name: str) -> Iterator[str]:
    if _content(files, name) == ["0"]:
        yield f"{name} = 0"


@dataclass(frozen=True)
class _Array:
    """The files of a trace array."""

    files: Files
    directory: str
    """Path of the array's directory, relative to the mount's root and with a slash at its end.

    The path is "" if the directory is the mount's root.
    """

    def lines(self, name: str) -> list[str]:
        return _content(self.files, f"{self.directory}{name}")

    def settings(self) -> Iterator[str]:
        if self.lines("tracing_on") == ["0"]:
            yield "tracing_on = 0"
        for name in VALUES:
            for value in self.lines(name)[:1]:
                if value == "X":
                    yield from self._sizes()
                # "7 (expanded: 1410)" is a buffer of default size that is not in use yet.
                elif "(" not in value and chosen_word(value) not in DEFAULTS[name]:
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
        events = [f"events/{event}" for event in self.files.configured_events(self.directory)]
        for number, event in enumerate(events):
            yield from _pause(number)
            value = _text(self.files, f"{self.directory}{event}/filter").rstrip("\n")
            if value not in ("", NO_FILTER) and not REFUSED_FILTER.search(value):
                yield setting_line(f"{event}/filter", value)
        triggers = []
        for number, event in enumerate(events):
            yield from _pause(number)
            for value in saved_triggers(_text(self.files, f"{self.directory}{event}/trigger")):
                triggers.append(setting_line(f"{event}/trigger", value))
        yield from (triggers[index] for index in by_need(triggers))

    def _sizes(self) -> Iterator[str]:
        """Yield lines that set the buffer size of each CPU, for an array whose CPUs have different sizes."""
        for cpu in sorted(self.files.directories(f"{self.directory}per_cpu")):
            for value in self.lines(f"per_cpu/{cpu}/buffer_size_kb"):
                yield f"per_cpu/{cpu}/buffer_size_kb = {value}"

    def switches(self, *, is_instance: bool) -> Iterator[str]:
        """Yield lines that set the tracer, the options, the enabled events, and the commands of functions.

        `is_instance`: whether the array is that of an instance. If True, yield all options, because a new
        instance gets the options of the top-level array. Also yield `tracing_on = 1` if the instance records.
        If False, yield only options that differ from the defaults.
        """
        for value in self.lines("current_tracer"):
            if value not in DEFAULTS["current_tracer"]:
                yield f"current_tracer = {value}"
        # Linux: the tracer nop refuses each write of this option, which is an example.
        options = [word for word in self.lines("trace_options") if word != "notest_nop_refuse"]
        if wanted := [word for word in options if is_instance or not _is_default(word)]:
            yield f"trace_options = {' '.join(wanted)}"
        for event in sorted(word.replace(":", "/", 1) for word in self.lines("set_event")):
            if self.lines(f"events/{event}/enable")[:1] in (["1"], ["1*"]):
                yield f"events/{event}/enable = 1"
        # The newest line comes first.
        for word in reversed(self.lines("set_event")):
            if AWAITED in word:
                yield f"set_event = {word}"
        words = saved_words("set_ftrace_filter", "\n".join(self.lines("set_ftrace_filter")))
        if commands := [word for word in words if is_command(word)]:
            yield f"set_ftrace_filter = {' '.join(commands)}"
        if is_instance and self.lines("tracing_on") == ["1"]:
            yield "tracing_on = 1"


def _is_default(word: str) -> bool:
    """Return True if a word of trace_options, such as noblock, is the default in a new mount.

    For the option trace_printk_dest, either value counts as the default in the top array. Linux switches
    the option of the top array off when an instance switches its own on, and does not allow users to switch
    it off.
    """
    if word == "notrace_printk_dest":
        return True
    return word in DEFAULT_OPTIONS if not word.startswith("no") else word[2:] not in DEFAULT_OPTIONS


def _single_probes(
    files: Files, arrays: Iterable[_Array], probes: Iterable[ProbeSwitches] | None
) -> Iterator[str]:
    """Yield lines that switch the probes of single events, where the lines for the events are not enough.

    A line sets `enabled` if the probes' state differs from the event's. Another sets `optimized` if users
    have written to that file. These lines come after the switches of events, because switching an event
    switches its probes. `probes`: see saved_in_steps().
    """
    arrays = [*arrays]
    enabled = {word.replace(":", "/", 1) for array in arrays for word in array.lines("set_event")}
    configured = {event for array in arrays for event in files.configured_events(array.directory)}
    for number, probe in enumerate(_read_probes(files) if probes is None else probes):
        yield from _pause(number)
        event = probe.event
        # An event that is enabled only for its triggers is not in set_event.
        is_wanted = event in enabled or (
            event in configured and any(array.lines(f"events/{event}/enable") != ["0"] for array in arrays)
        )
        if not probe.can_change:
            continue
        if probe.is_enabled != is_wanted:
            yield f"{STATS}/{event}/enabled = {not is_wanted:d}"
        if probe.asked:
            yield f"{STATS}/{event}/optimized = {probe.asked}"


def _read_probes(files: Files) -> Iterator[ProbeSwitches]:
    """Yield the switches of each event's probes from the files in kprobes/stats."""
    from emulated_kernel.vfs.trees.stats import ProbeSwitches

    for group in sorted(files.directories(STATS) if files.exists(STATS) else ()):
        for event in sorted(files.directories(f"{STATS}/{group}")):
            name = f"{STATS}/{group}/{event}"
            yield ProbeSwitches(
                event=f"{group}/{event}",
                is_enabled=_text(files, f"{name}/enabled") == "1\n",
                asked=_text(files, f"{name}/asked").strip(),
                can_change=UNSWITCHED.isdisjoint(_text(files, f"{name}/mode").split()),
            )


def _options_of_tracers(files: Files, tracefs: str) -> Iterator[str]:
    """Yield lines that set the options that trace_options omits: those of all tracers but the current one.

    All trace arrays share these options.
    """
    listed = set(_content(files, f"{tracefs}trace_options"))
    for name in sorted(files.names(f"{tracefs}options")):
        if listed.isdisjoint((name, f"no{name}")):
            value = files.read(f"{tracefs}options/{name}").strip()
            if value != f"{name in DEFAULT_OPTIONS:d}":
                yield f"options/{name} = {value}"


def _content(files: Files, name: str) -> list[str]:
    return _text(files, name).splitlines()


def _text(files: Files, name: str) -> str:
    try:
        return files.read(name)
    except FileNotFoundError:
        return ""
