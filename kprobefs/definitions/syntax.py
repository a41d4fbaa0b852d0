r"""Syntax of definition files, and conversion of the kernel's output to it.

A line defines a dynamic event in the syntax of dynamic_events, or it gives a value to write to a file:

    p:reads vfs_read count=$arg3
    events/kprobes/reads/filter = count > 3
    instances/slow/events/kprobes/reads/enable = 1
    kprobes/enabled = 0

Whitespace, "=" and backslashes in names of files are escaped as in /proc/mounts: a blank is \040.
"""

from __future__ import annotations

import re
from codecs import BOM_UTF8, BOM_UTF16_BE, BOM_UTF16_LE
from collections.abc import Iterator

from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.lazy_pattern import lazy_pattern
from kprobefs.common.errors import CliError, ExitStatus

DEFINITION = lazy_pattern(r"(?P<kind>[a-z])(?P<count>\d*)(?::(?P<name>\S+))?\s+(?P<rest>.*)")
"""Matches a line that defines a dynamic event."""
SETTING = lazy_pattern(r"(?P<file>\S+)\s+=(?:\s+(?P<value>.*))?$")
"""Matches a line that writes a value to a file."""
NOT_A_LINE = "neither a definition nor 'FILE = VALUE'"
"""Message for a line that is neither a definition nor a setting."""
_NO_PLACE = lazy_pattern(
    r"(?P<kind>[prjft]\d*)(?::(?:[^\s/]*/)?(?P<name>[^\s/]+))?"
    r"(?P<arguments>(?:\s+(?:[$%@+\\-]|[^\s=/]*=).*)?)$"
)
"""Matches a definition of a probe without a place: nothing or a fetch argument follows its name."""
_SOURCE_LINE = lazy_pattern(r"[pr]\d*(?::\S+)?\s+(?P<place>[^\s:]+\.[chS]:\d+)(?:\s.*)?$")
"""Matches a definition of a probe that has a line of a source file as its place."""
GROUPS = {
    "p": "kprobes",
    "r": "kprobes",
    "f": "fprobes",
    "s": "synthetic",
    "e": "eprobes",
    "t": "tracepoints",
}
"""Letter for the kind of an event -> default group of events of this kind."""
_BYTE_ORDER_MARKS = {
    mark.decode("utf-8", "surrogateescape"): encoding
    for mark, encoding in ((BOM_UTF8, "UTF-8"), (BOM_UTF16_LE, "UTF-16"), (BOM_UTF16_BE, "UTF-16"))
}
"""Text to which a byte order mark at the start of a file is decoded -> encoding that the mark announces."""
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
"""Names of files that contain a list of words. Writing a word adds it to the list."""
DEFINING = ("dynamic_events", "kprobe_events", "synthetic_events", "uprobe_events")
"""Names of files in which a write defines events."""
RECORDS = frozenset({
    "trace", "trace_pipe", "trace_pipe_raw", "trace_marker", "trace_marker_raw", "snapshot", "snapshot_raw",
    "saved_cmdlines", "saved_tgids", "error_log", "free_buffer",
})  # fmt: skip
"""Names of files of tracefs that contain records or perform an action, and are therefore no settings."""
MODULE_FILTERS = ("set_ftrace_notrace", "set_ftrace_filter")
"""Names of list files that accept words of the form `FUNCTION:mod:MODULE`."""
TRIGGER = lazy_pattern(r"[a-z_]+:")
"""Matches the start of a line of a trigger file that shows a trigger."""
HIST = "hist:"
"""Start of a line of a trigger file that shows a histogram trigger."""
OTHERS_VARIABLE = lazy_pattern(r"\$(?P<event>[\w-]+\.\w+)\.(?P<variable>\w+)")
"""Matches a reference to the variable of a named event, as a trigger file shows it."""
NO_PID = "no pid"
"""Line that set_ftrace_pid or set_ftrace_notrace_pid shows if its list of pids is empty."""


@dataclass(frozen=True)
class Line:
    """One line of a file of definitions."""

    file: str
    number: int
    """Number of the line in the file, from 1; 0 if the line does not come from a file."""
    text: str
    typed: str = ""
    """The user's own text if `text` was made from it; otherwise "".

    Error messages show this in place of `text`.
    """


def read_lines(path: str, text: str) -> Iterator[Line]:
    """Yield the lines of a file, except blank lines and comments.

    A backslash at the end of a line joins it with the next line that is not a comment.
    Raises: CliError (the file begins with a byte order mark).
    """
    for mark, encoding in _BYTE_ORDER_MARKS.items():
        if text.startswith(mark):
            why = f"it begins with a byte order mark ({encoding}), which no kernel takes"
            raise CliError(f"{path}: {why}; save it as UTF-8 without the mark", ExitStatus.USAGE)
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


@dataclass(frozen=True)
class Definition:
    """The parts of a dynamic event's definition."""

    kind: str
    count: str
    """maxactive, or "" if the kernel chooses it. dynamic_events shows the value that the kernel chose."""
    event: str
    """The event as GROUP/NAME, or "" if the kernel chooses the name."""
    rest: str
    """Location and arguments, in the form in which dynamic_events shows them."""


def parse_definition(text: str) -> Definition | None:
    """Return the definition that a line contains, or None if the line defines no event."""
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
    return Definition(kind, found["count"], event, " ".join([_as_shown(kind, place), *arguments]))


def is_definition(text: str) -> bool:
    """Return True if a line has the form of a command of dynamic_events: it defines or removes an event."""
    return text.startswith("-:") or DEFINITION.match(text) is not None


def advice(text: str) -> str:
    """Return advice about a line that defines a probe without a place, or at a line of a source file.

    Return "" for any other line.
    """
    if found := _SOURCE_LINE.match(text):
        return f"a source line is no place; `kprobefs explain {found['place']}` gives the offset"
    found = _NO_PLACE.match(text)
    if found is None:
        return ""
    written = f"{found['kind']}:NAME {found['name'] or 'PLACE'}{found['arguments']}"
    return f"a definition needs a place; write {written}"


def _as_shown(kind: str, place: str) -> str:
    """Return the place of an event in the form in which dynamic_events shows it.

    `kind`: letter of the kind of event.
    """
    if kind == "e":
        return place.replace("/", ".", 1)
    if offset := re.fullmatch(r"(.+)([+:])(0x[0-9a-fA-F]+|\d+)", place):
        number = int(offset[3], 16 if offset[3].startswith("0x") else 10)
        if offset[2] == ":":
            return f"{offset[1]}:0x{number:016x}"
        return f"{offset[1]}+{number}" if number else offset[1]
    return place


def refused_path(path: str) -> str:
    """Return the reason why no line may write to the file `path`, or "" if lines may write to it."""
    parts = path.split("/")
    if path.startswith("/") or ".." in parts:
        return "not a file of the tracefs"
    return "not a setting" if parts[-1] in RECORDS else ""


def is_trigger(text: str) -> bool:
    """Return True if a line of a definition file writes to a trigger file."""
    setting = SETTING.match(text)
    return setting is not None and setting["file"].endswith("/trigger")


def saved_words(name: str, text: str) -> list[str]:
    """Return the words that must be written to the list file `name` so that it shows `text`.

    Words with a colon come last, in the order in which they were written, because the kernel shows them in
    reverse order.
    """
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
        # The kernel lists each function of the same name, but one word selects all of them.
        words.setdefault(without_count(word), word)
    # The kernel shows the words with a colon in reverse order.
    later = [word for word in words.values() if ":" in word]
    return [word for word in words.values() if ":" not in word] + later[::-1]


def is_command(word: str) -> bool:
    """Return True if a word of set_ftrace_filter is a command such as `FUNCTION:traceoff`."""
    return ":" in word and not word.partition(":")[2].startswith("mod:")


def without_count(word: str) -> str:
    """Return a word of a list file, such as set_ftrace_filter, without the digits of its count.

    The kernel decrements the count at each hit. Without it, `FUNCTION:traceoff:5` is `FUNCTION:traceoff:`.
    """
    return re.sub(r":\d+$", ":", word)


def chosen_word(value: str) -> str:
    """Return the word in brackets, which marks the current choice in `value`.

    If no word has brackets, return the whole value.
    """
    chosen = re.search(r"(?:^| )\[(\S+)\](?: |$)", value)
    return chosen[1] if chosen else value


def saved_triggers(text: str) -> list[str]:
    """Return the commands that set the triggers in the text of a trigger file; those of histograms come last.

    Otherwise, the commands are in the order in which the triggers were set.
    """
    found: list[str] = []
    for line in text.split("\n"):
        # The filter of a trigger may contain newlines.
        if found and line and (_is_open(found[-1]) or not TRIGGER.match(line)):
            found[-1] += f"\n{line}"
        elif line and not line.startswith("#"):
            found.append(line)
    # The kernel lists histograms in their order, after the other triggers, the newest of which comes first.
    hists = [each for each in found if each.startswith(HIST)]
    others = [each for each in found if not each.startswith(HIST)]
    return [_command(one_line(each)) for each in (*reversed(others), *hists)]


def setting_line(name: str, value: str) -> str:
    """Return the line that writes the filter or trigger `value` to the file `name`.

    If a string in `value` has a newline, which a line cannot contain, return a comment that says so.
    """
    line = f"{name} = {one_line(value)}"
    return line if "\n" not in line else f"# {name}: has a newline in a string, which no line can say"


def one_line(value: str) -> str:
    """Return a filter or trigger with blanks in place of the newlines that are outside of its strings."""
    joined, *rest = value.split("\n")
    for line in rest:
        joined += ("\n" if _is_open(joined) else " ") + line
    return joined


def _is_open(text: str) -> bool:
    """Return True if the text ends inside a quoted string."""
    quote = ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
    return bool(quote)


def _command(line: str) -> str:
    """Return the command that sets a trigger, from its line in a trigger file."""
    line = line.removesuffix(" [active]")
    is_paused = line.endswith(" [paused]")
    head, condition, rest = line.removesuffix(" [paused]").partition(" if ")
    if head.startswith(HIST):
        head = _hist_command(head) + ":pause" * is_paused
    else:
        head = re.sub(r":(?:unlimited|count=(\d+))$", lambda count: f":{count[1]}" if count[1] else "", head)
    return f"{head}{condition}{rest}"


def _hist_command(shown: str) -> str:
    """Return a histogram's command in the form that the kernel accepts, from the form that it shows.

    Linux shows `sort=KEY.log2` and `$GROUP.EVENT.VARIABLE`, but accepts only `sort=KEY` and
    `GROUP.EVENT.$VARIABLE`. Linux 7.2 shows the key common_cpu twice.
    """
    parts = shown.replace("common_cpu" * 2, "common_cpu").split(":")
    for index, part in enumerate(parts):
        attribute, _, value = part.partition("=")
        if attribute == "sort":
            parts[index] = f"sort={','.join(_sort_key(key) for key in value.split(','))}"
        else:
            parts[index] = OTHERS_VARIABLE.sub(r"\g<event>.$\g<variable>", part)
    return ":".join(parts)


def _sort_key(shown: str) -> str:
    order = ".descending"
    name = shown.removesuffix(order).removeprefix("$").partition(".")[0]
    return name + order * shown.endswith(order)


def escaped(name: str) -> str:
    """Return a file's name as one word, with whitespace, "=" and backslashes as octal escapes."""
    return re.sub(
        r"[\s=\\]",
        lambda found: "".join(f"\\{byte:03o}" for byte in found[0].encode("utf-8", "surrogateescape")),
        name,
    )


def unescaped(word: str) -> str:
    """Return the file's name from a word that escaped() returned."""
    data = re.sub(
        rb"\\([0-3][0-7]{2})",
        lambda octal: bytes((int(octal[1], 8),)),
        word.encode("utf-8", "surrogateescape"),
    )
    return data.decode("utf-8", "surrogateescape")


def word_column(text: str, number: int) -> int:
    """Return the index in `text` at which the word with the index `number` begins.

    If there is no such word, return the length of `text`.
    """
    starts = [found.start() for found in re.finditer(r"\S+", text)]
    return starts[number] if number < len(starts) else len(text)
