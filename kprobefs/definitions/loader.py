"""`kprobefs apply` and `save`: probe definitions and settings of a tracefs, as lines that people write.

A line defines a dynamic event, in the words of dynamic_events, or it says what to write into a file:

    p:reads vfs_read count=$arg3
    events/kprobes/reads/filter = count > 3
    instances/slow/events/kprobes/reads/enable = 1
    kprobes/enabled = 0

Blanks and the like in names of files are written as in /proc/mounts, \\040. Naming an instance makes it.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.common.errors import escape_for_terminal
from kprobefs.definitions.tracefs_files import OUTSIDE, Files

if TYPE_CHECKING:
    from emulated_kernel.vfs.trees.stats import ProbeState

DEFINITION = re.compile(r"(?P<kind>[a-z])(?P<count>\d*)(?::(?P<name>\S+))?\s+(?P<rest>.*)")
SETTING = re.compile(r"(?P<file>\S+)\s+=(?:\s+(?P<value>.*))?$")
CURSOR = re.compile(r"^ *\^$")
GROUPS = {
    "p": "kprobes",
    "r": "kprobes",
    "f": "fprobes",
    "s": "synthetic",
    "e": "eprobes",
    "t": "tracepoints",
}
"""Where events are that name no group."""
VALUES = (
    "trace_clock",
    "buffer_size_kb",
    "buffer_percent",
    "saved_cmdlines_size",
    "tracing_thresh",
    "max_graph_depth",
)
"""Files of a trace array, as far as it has them, that are saved whole, in this order."""
LISTS = (
    "set_event_pid",
    "set_event_notrace_pid",
    "set_ftrace_pid",
    "set_ftrace_notrace_pid",
    "set_ftrace_notrace",
    "set_ftrace_filter",
    "set_graph_notrace",
    "set_graph_function",
    "stack_trace_filter",
)
"""Files of words, which are added by writing them."""
MODULE_FILTERS = ("set_ftrace_notrace", "set_ftrace_filter")
"""Those of them that take functions of one module."""
ARMED = "kprobes/enabled"
OPTIMIZATION = "sysctl/debug/kprobes-optimization"
"""Both are on in a new mount."""
STATS = "kprobes/stats"
WISHES = ("enable", "optimized")
"""Files that say what is so yet, not what they were asked for."""
UNSWITCHED = {"pending", "gone"}
"""Modes of probes that nothing can be switched of."""
STACK_TRACER = "sysctl/kernel/stack_tracer_enabled"
"""Off in a new mount."""
NO_FILTER = "none"
REFUSED_FILTER = re.compile(r"\n(?: *\^\nparse_error: .*|Error: \(.*\))\n*\Z")
"""How the file of a filter ends that was refused: its event has none then."""
TRIGGER = re.compile(r"[a-z_]+:")
NO_PID = "no pid"


@dataclass(frozen=True)
class Line:
    """One line of a file of definitions."""

    file: str
    number: int
    """0 where it stands in no file."""
    text: str
    typed: str = ""
    """Its end, or what that was made of: what is told where the line isn't the user's own."""


class DefinitionError(Exception):
    """A line that can't be done: what to tell, after the file's name and the line's number."""

    def __init__(self, message: str, cursor: int | None = None) -> None:
        """`cursor`: index in the line that the kernel's error log points at."""
        super().__init__(message)
        self.cursor = cursor


def read_lines(path: str, text: str) -> Iterator[Line]:
    """Lines that say something. A backslash at the end joins the next one that is no comment."""
    parts: list[str] = []
    first = 0
    for number, line in enumerate([*text.replace("\r\n", "\n").split("\n"), ""], 1):
        if line.lstrip().startswith("#"):
            continue
        first = first if parts else number
        parts.append(line.removesuffix("\\").strip())
        if not line.endswith("\\"):
            if joined := " ".join(filter(None, parts)):
                yield Line(path, first, joined)
            parts = []


class Loader:
    """Makes a tracefs what lines say, and leaves alone what is so already."""

    def __init__(self, files: Files) -> None:
        """`files` are those that are to be written. Raises: CliError."""
        self._files = files
        self._tracefs = files.tracefs()
        self._defined: set[str] = set()
        """Events of the lines so far; a further line for one of them adds to it."""
        self._error_logs = {"": self._read("error_log")}
        """By trace array: "" or instances/NAME/."""
        self._known: _ExistingDefinitions | None = None
        """What dynamic_events says; None where lines have changed it in ways that only reading it tells."""

    def apply(self, lines: Sequence[Line]) -> list[str]:
        """Apply all lines; return a message for each that failed."""
        failed: list[str] = []
        told: list[str] = []
        later = list(lines)
        while later:
            now = later
            later = []
            told = []
            for line in now:
                try:
                    self._do(line.text)
                except DefinitionError as refused:
                    report = _report(line, refused)
                    # A trigger may need a variable of one that comes behind it.
                    if _is_trigger(line.text):
                        later.append(line)
                        told.append(report)
                    else:
                        failed.append(report)
            if len(later) == len(now):
                break
        return failed + told

    def _do(self, text: str) -> None:
        if text.startswith("#"):
            return
        if setting := SETTING.match(text):
            self._set(setting["file"], setting["value"] or "", setting.start("value"))
        elif text.startswith("-:") or DEFINITION.match(text):
            self._define(text)
        else:
            raise DefinitionError("neither a definition nor 'FILE = VALUE'")

    def _define(self, text: str) -> None:
        definition = _definition(text)
        if definition is None:
            self._known = None
            self._write("dynamic_events", text, 0)
            return
        known = self._known
        if known is None or known.is_unsure(definition):
            known = self._known = _ExistingDefinitions(self._read("dynamic_events").splitlines())
        if not known.has(definition):
            if definition.event in known.events and definition.event not in self._defined:
                self._remove(definition.event)
                self._known = None
            self._write("dynamic_events", text, 0)
            known.add(definition)
        self._defined.add(definition.event)

    def _remove(self, event: str) -> None:
        """Make room for another definition of an event."""
        instances = self._files.directories(f"{self._tracefs}instances")
        for place in ("", *(f"instances/{name}/" for name in sorted(instances))):
            switch = f"{place}events/{event}/enable"
            if self._files.exists(self._path(switch)):
                self._write(switch, "0", None)
        try:
            self._write("dynamic_events", f"-:{event}", None)
        except DefinitionError as refused:
            # Linux: a trigger that counts by an event's fields keeps it.
            triggers = list(self._triggers(event))
            raise DefinitionError(f"{refused}: {'; '.join(triggers)}" if triggers else str(refused)) from None

    def _triggers(self, event: str) -> Iterator[str]:
        """What an event's triggers are, with the files that take them away again."""
        instances = self._files.directories(f"{self._tracefs}instances")
        for place in ("", *(f"instances/{name}/" for name in sorted(instances))):
            file = f"{place}events/{event}/trigger"
            if self._files.exists(self._path(file)):
                yield from (f"{file} has {each}" for each in saved_triggers(self._read(file)))

    def _set(self, name: str, value: str, column: int) -> None:
        self._known = None
        path = _unescaped(name)
        parts = path.split("/")
        if path.startswith("/") or ".." in parts:
            raise DefinitionError("not a file of the tracefs")
        if parts[0] == "instances" and len(parts) > 1 and parts[1]:
            self._make(f"instances/{parts[1]}")
        if parts[-1] == "trace_options":
            present = set(self._read(path).split())
            for word in value.split():
                if word not in present:
                    self._write(path, word, column + value.index(word))
        elif parts[-1] in LISTS:
            self._add(path, value, column)
        elif parts[-1] == "trigger":
            if not any(_covers(each, value) for each in saved_triggers(self._read(path))):
                self._write(path, value, column)
        # While the loader's own requests may be traced, it makes as few as it can.
        elif parts[-1] in WISHES or value not in (text := self._read(path).strip(), _chosen(text)):
            self._write(path, value, column)

    def _make(self, instance: str) -> None:
        """The instance, if it isn't there, and what its error_log says before anything of ours."""
        if (log := f"{instance}/") in self._error_logs:
            return
        try:
            self._files.mkdir(f"{self._tracefs}{instance}")
        except FileExistsError:
            self._error_logs[log] = self._read(f"{instance}/error_log")
        except OSError as error:
            raise DefinitionError(f"{instance}: {error.strerror}") from None
        else:
            self._error_logs[log] = ""

    def _add(self, path: str, value: str, column: int) -> None:
        """Write the words of a list that aren't in it."""
        present = set(map(_without_count, saved_words(path, self._read(path))))
        for word in re.finditer(r"\S+", value):
            if _without_count(word[0]) in present:
                continue
            try:
                self._write(path, word[0], column + word.start())
            except DefinitionError:
                # EINVAL where each function that a pattern means has the command already.
                pattern, colon, command = _without_count(word[0]).partition(":")
                had = (each.partition(":") for each in present)
                if not colon or not any(c == command and fnmatchcase(f, pattern) for f, _, c in had):
                    raise

    def _path(self, name: str) -> str:
        return name if name.partition("/")[0] in OUTSIDE else f"{self._tracefs}{name}"

    def _read(self, name: str) -> str:
        try:
            return self._files.read(self._path(name))
        except OSError as error:
            if error.errno in (errno.EINVAL, errno.EACCES):
                # A file that only takes.
                return ""
            raise DefinitionError(f"{name}: {error.strerror}") from None

    def _write(self, name: str, value: str, column: int | None) -> None:
        """`column`: where `value` begins in its line; None where it doesn't stand there."""
        try:
            self._files.write(self._path(name), f"{value}\n")
        except OSError as error:
            array = "/".join([*name.split("/")[:2], ""]) if name.startswith("instances/") else ""
            before = self._error_logs.get(array)
            now = self._read(f"{array}error_log")
            self._error_logs[array] = now
            told, cursor = _last_error(now, value) if now != before else ("", None)
            reason = f"{told}: {error.strerror}" if told else str(error.strerror)
            at = None if cursor is None or column is None else column + cursor
            raise DefinitionError(reason, at) from None


@dataclass(frozen=True)
class _Definition:
    """A dynamic event's definition, taken apart."""

    kind: str
    count: str
    """maxactive; "" where it is the kernel's choice, which shows it then."""
    event: str
    """group/name; "" where the kernel makes up a name."""
    rest: str


def _definition(text: str) -> _Definition | None:
    found = DEFINITION.match(text)
    if found is None or SETTING.match(text):
        return None
    kind = found["kind"]
    name = found["name"] or ""
    if kind == "p" and found["rest"].startswith("/"):
        event = name if "/" in name or not name else f"uprobes/{name}"
    else:
        event = name if "/" in name or not name else f"{GROUPS.get(kind, 'kprobes')}/{name}"
    place, *arguments = found["rest"].split()
    if kind != "s":
        arguments = [
            word if "=" in word else f"arg{number}={word}" for number, word in enumerate(arguments, 1)
        ]
    return _Definition(kind, found["count"], event, " ".join([_as_shown(kind, place), *arguments]))


def _as_shown(kind: str, place: str) -> str:
    """Where an event is, as dynamic_events writes it."""
    if kind == "e":
        return place.replace("/", ".", 1)
    if offset := re.fullmatch(r"(.+)([+:])(0x[0-9a-fA-F]+|\d+)", place):
        number = int(offset[3], 16 if offset[3].startswith("0x") else 10)
        if offset[2] == ":":
            return f"{offset[1]}:0x{number:016x}"
        return f"{offset[1]}+{number}" if number else offset[1]
    return place


class _ExistingDefinitions:
    """The definitions that there are, as dynamic_events says, and those that were written since."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.events: set[str] = set()
        self._counts: dict[tuple[str, str, str], set[str]] = {}
        """By kind, event and rest, and by kind, no event and rest."""
        for each in map(_definition, lines):
            if each is not None:
                self.add(each)

    def add(self, definition: _Definition) -> None:
        self.events.add(definition.event)
        for event in {definition.event, ""}:
            self._of(definition, event).add(definition.count)

    def has(self, wanted: _Definition) -> bool:
        """Whether there is such a one."""
        counts = self._of(wanted, wanted.event)
        return wanted.count in counts or (not wanted.count and bool(counts))

    def is_unsure(self, wanted: _Definition) -> bool:
        """Whether a name or a maxactive that the kernel has chosen since may be the one that is meant."""
        return (bool(wanted.event) and "" in self.events) or (
            bool(wanted.count) and "" in self._of(wanted, wanted.event)
        )

    def _of(self, definition: _Definition, event: str) -> set[str]:
        return self._counts.setdefault((definition.kind, event, definition.rest), set())


def _is_trigger(text: str) -> bool:
    setting = SETTING.match(text)
    return setting is not None and setting["file"].endswith("/trigger")


def _last_error(log: str, value: str) -> tuple[str, int | None]:
    """What the newest entry of an error_log says, and which character of `value` it points at."""
    lines = log.splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith("[")]
    if not heads:
        return "", None
    entry = lines[heads[-1] :]
    told = entry[0].rpartition("error: ")[2]
    command = entry[1] if len(entry) > 1 else ""
    at = command.rfind(value) if value else -1
    if at < 0 or len(entry) < 3 or not CURSOR.match(entry[2]):
        return told, None
    return told, len(entry[2]) - 1 - at


def _covers(existing: str, wanted: str) -> bool:
    """Whether a trigger is there: the kernel adds what isn't said, and counts down."""
    head, _, condition = re.sub(r"^([a-z_:\w]+?):\d+(?= |$)", r"\1", wanted).partition(" if ")
    found, _, given = re.sub(r"^([a-z_:\w]+?):\d+(?= |$)", r"\1", existing).partition(" if ")
    parts = head.split(":")
    if parts[0] != "hist":
        return (head, condition) == (found, given)
    return set(parts) <= set(found.split(":")) and condition == given


def _report(line: Line, refused: DefinitionError) -> str:
    place = f"{line.file}:{line.number}" if line.number else line.file
    text = line.typed or line.text
    report = f"{place}: {refused}\n    {text}"
    cursor = -1 if refused.cursor is None else refused.cursor - len(line.text) + len(text)
    if 0 <= cursor <= len(text):
        report += f"\n    {' ' * cursor}^"
    return "\n".join(map(escape_for_terminal, report.split("\n")))


# Saving


def saved(files: Files, probes: Iterable[ProbeState] | None = None) -> Iterator[str]:
    """The lines that make a new mount what the one of `files` is; what is switched on comes last.

    `probes` is what the files of thousands say, where that is known without reading them. Raises: CliError.
    """
    tracefs = files.tracefs()
    arrays = {"": _Array(files, tracefs)}
    for instance in sorted(files.directories(f"{tracefs}instances")):
        arrays[f"instances/{_escaped(instance)}/"] = _Array(files, f"{tracefs}instances/{instance}/")
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
                    yield f"{name} = {_chosen(value)}"
        [mask] = self.lines("tracing_cpumask")
        if int(mask.replace(",", ""), 16) + 1 != 1 << len(self.files.directories(f"{self.directory}per_cpu")):
            yield f"tracing_cpumask = {mask}"
        for name in LISTS:
            words = saved_words(name, "\n".join(self.lines(name)))
            if wanted := [word for word in words if not _is_command(word)]:
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
                yield _setting(f"{event}/filter", value)
        for event in events:
            for value in saved_triggers(_text(self.files, f"{self.directory}{event}/trigger")):
                yield _setting(f"{event}/trigger", value)

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
        if commands := list(filter(_is_command, words)):
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


def saved_words(name: str, text: str) -> list[str]:
    """What to write into the list `name` to have what it shows, in the order in which it was given."""
    words: dict[str, str] = {}
    for line in text.splitlines():
        if not line or line.startswith("#") or line == NO_PID:
            continue
        function, _, module = line.partition(" [")
        module, _, command = module.partition("]")
        if not module:
            word = re.sub(
                r":(?:unlimited|count=(\d+))$", lambda count: f":{count[1]}" if count[1] else "", line
            )
        elif command:
            word = saved_words(name, f"{function}{command}")[0]
        else:
            is_of_module = name.rpartition("/")[2] in MODULE_FILTERS
            word = f"{function}:mod:{module}" if is_of_module else function
        # Functions of the same name are one word.
        words.setdefault(_without_count(word), word)
    # Of those with a colon the latest is shown first.
    later = [word for word in words.values() if ":" in word]
    return [word for word in words.values() if ":" not in word] + later[::-1]


def _is_command(word: str) -> bool:
    """Whether a word of set_ftrace_filter says what a function's call does."""
    return ":" in word and not word.partition(":")[2].startswith("mod:")


def _without_count(word: str) -> str:
    """A word of a list with nothing for the number of its command, which counts down."""
    return re.sub(r":\d+$", ":", word)


def _chosen(value: str) -> str:
    """The word in brackets among those that may be chosen, or what else a file says."""
    chosen = re.search(r"(?:^| )\[(\S+)\](?: |$)", value)
    return chosen[1] if chosen else value


def saved_triggers(text: str) -> list[str]:
    """The commands that make an event's triggers, in the order in which they were given."""
    found: list[str] = []
    for line in text.split("\n"):
        # Their filters have the newlines that they were written with.
        if found and line and (_is_open(found[-1]) or not TRIGGER.match(line)):
            found[-1] += f"\n{line}"
        elif line and not line.startswith("#"):
            found.append(line)
    return [_command(_one_line(each)) for each in reversed(found)]


def _setting(name: str, value: str) -> str:
    """The line for a filter or trigger."""
    line = f"{name} = {_one_line(value)}"
    return line if "\n" not in line else f"# {name}: has a newline in a string, which no line can say"


def _one_line(value: str) -> str:
    """A filter or trigger with blanks for newlines, which are the same outside of strings."""
    joined, *rest = value.split("\n")
    for line in rest:
        joined += ("\n" if _is_open(joined) else " ") + line
    return joined


def _is_open(text: str) -> bool:
    """Whether text ends within a string."""
    quote = ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
    return bool(quote)


def _command(line: str) -> str:
    """A trigger as it is shown, as it is written."""
    line = line.removesuffix(" [active]")
    if line.endswith(" [paused]"):
        head, condition, rest = line.removesuffix(" [paused]").partition(" if ")
        line = f"{head}:pause{condition}{rest}"
    return re.sub(r"^([a-z_:\w]+?):(?:unlimited|count=(\d+))", lambda count: _counted(*count.groups()), line)


def _counted(command: str, count: str | None) -> str:
    return f"{command}:{count}" if count else command


def _content(files: Files, name: str) -> list[str]:
    return _text(files, name).splitlines()


def _text(files: Files, name: str) -> str:
    try:
        return files.read(name)
    except FileNotFoundError:
        return ""


def _escaped(name: str) -> str:
    """A file's name as a word: what would end it in octal, byte by byte."""
    return re.sub(
        r"[\s=\\]",
        lambda found: "".join(f"\\{byte:03o}" for byte in found[0].encode("utf-8", "surrogateescape")),
        name,
    )


def _unescaped(word: str) -> str:
    """The other way round."""
    data = re.sub(
        rb"\\([0-3][0-7]{2})",
        lambda octal: bytes((int(octal[1], 8),)),
        word.encode("utf-8", "surrogateescape"),
    )
    return data.decode("utf-8", "surrogateescape")
