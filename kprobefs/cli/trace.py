"""`kprobefs trace`: a one-liner that defines probes, runs a command, shows what they record, removes them."""

from __future__ import annotations

import filecmp
import json
import os
import re
import select
import shutil
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TextIO

from kprobefs.common import terminal
from kprobefs.common.daemon_registry import start_time
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal

if TYPE_CHECKING:
    from kprobefs.definitions.loader import Loader
    from kprobefs.definitions.syntax import Line
    from kprobefs.definitions.tracefs_files import Files

PROBE = re.compile(r"(?P<kind>[pr]\d*|f\d*):(?P<place>\S+)(?P<arguments>(?:\s.*)?)$")
NAME = re.compile(r"trace_(?P<pid>\d{1,9})_(?P<started>[0-9a-f]{1,16})_(?P<namespace>[0-9a-f]{1,16})")
"""Of instances and groups."""
PID_NAMESPACE = "/proc/self/ns/pid"
EVENT = re.compile(r"t:(?P<group>\w+)[:/](?P<event>\w+)$")
HEAD = (
    r"\s*(?P<comm>.{0,15})-(?P<pid>\d+)\s+(?:\(\s*\S+\)\s+)?\[(?P<cpu>\d+)\]\s+(?P<flags>\S+)\s+"
    r"(?P<time>[\d.]+): "
)
"""Of a line of trace_pipe, with its usual options. A command's name may have anything in it, and so may what
an event says: that looks like another head must be neither's.
"""
LINE = re.compile(rf"{HEAD}(?P<event>\w+): (?P<text>.*)$")
FIELD = re.compile(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)')
CALL = re.compile(
    rf"(?P<before>{HEAD})sys_(?P<name>\w+)(?P<text>\((?P<arguments>.*)\)| -> (?P<result>0x[0-9a-f]+))$"
)
"""An event of a single system call, which shows the call in place of its own name."""
PRINT_FMT = re.compile(r'^print fmt: "((?:[^"\\]|\\.)*)"(.*)', re.MULTILINE)
NUMBERS = "diux"
Layout = tuple[re.Pattern[str], list[tuple[str, str]]]
Layouts = dict[str, list[Layout]]
CONVERSION = re.compile(r"%[-+ #0]*\d*(?:\.\d+)?(?:hh?|ll?|L|z)?(p[a-zA-Z0-9]*|[a-zA-Z%])")
READ_SIZE = 1 << 16
NAMES = 5
"""Files that a line names at most."""
NOTHING = 3
"""Exit status of the process that shows records, where there were none."""
UNWRITTEN = 100
"""Plus an errno: that they couldn't be written."""
USAGE = "p:PLACE [NAME=ARGUMENT...], r:PLACE [...], or t:GROUP:EVENT"


def named(probes: Sequence[str], group: str) -> tuple[list[str], list[str]]:
    """Return definitions of probe events in a group of their own, and all events as group/name.

    Raises: CliError.
    """
    definitions: list[str] = []
    events: list[str] = []
    for text in probes:
        if event := EVENT.match(text):
            events.append(f"{event['group']}/{event['event']}")
            continue
        probe = PROBE.match(text)
        if probe is None:
            raise CliError(f"{escape_for_terminal(text)!r} is no probe: {USAGE}", ExitStatus.USAGE)
        name = base = re.sub(r"\W", "_", probe["place"].rpartition(":")[2])[:40]
        while f"{group}/{name}" in events:
            name = f"{base}_{len(events)}"
        events.append(f"{group}/{name}")
        definitions.append(f"{probe['kind']}:{group}/{name} {probe['place']}{probe['arguments']}")
    return definitions, events


class TraceSession:
    """Probes for the life of a command, in an instance of their own."""

    def __init__(self, probes: Sequence[str], filter_text: str, output: TextIO, *, as_json: bool) -> None:
        """Raises: CliError (wrong usage)."""
        self._name = own_name()
        self._definitions, self._events = named(probes, self._name)
        self._filter = filter_text
        self._output = output
        self.as_json = as_json
        self._layouts: Layouts = {}
        self._colours = terminal.has_colours(output) and not as_json

    @contextmanager
    def attached(self, directory: str, command: Sequence[str]) -> Iterator[str]:
        """The probes of a mount, within; gives where the command is to be run. Raises: CliError.

        That is scratch/, where there is one: files there are the guest's. What the command names of the
        working directory is copied there meanwhile.
        """
        from kprobefs.definitions.tracefs_files import HostFiles

        files = HostFiles(directory)
        tracefs = Path(directory, files.tracefs())
        instance = tracefs / "instances" / self._name
        scratch = Path(directory, "scratch")
        with _copies(command, scratch) if scratch.is_dir() else nullcontext(os.getcwd()) as place:
            sweep(files, tracefs)
            try:
                instance.mkdir()
                self._define(files, directory)
                reader, writer = os.pipe()
                self._output.flush()
                # A process: there may be no thread where the command is forked.
                child = os.fork()
                if child == 0:
                    os.close(writer)
                    self._stream(instance, reader)
                os.close(reader)
                try:
                    self._switch_on(files, child)
                    yield place
                finally:
                    for event in self._events:
                        with suppress(OSError):
                            (instance / "events" / event / "enable").write_text("0")
                    os.close(writer)
                    _, status = os.waitpid(child, 0)
                if status >> 8 > UNWRITTEN:
                    why = os.strerror((status >> 8) - UNWRITTEN)
                    print(
                        f"kprobefs: {escape_for_terminal(self._output.name)}: {why}: records are missing",
                        file=sys.stderr,
                    )
                if status == NOTHING << 8:
                    print(f"kprobefs: {_why_nothing(command, scratch)}", file=sys.stderr)
            finally:
                self._remove(tracefs, instance)

    def _define(self, files: Files, directory: str) -> None:
        from kprobefs.definitions.loader import Loader
        from kprobefs.definitions.syntax import Line

        definitions = [
            Line("trace", 0, text, re.sub(r":\S+ ", ":", text, count=1)) for text in self._definitions
        ]
        self._apply(Loader(files), definitions)
        for event, name in self._named():
            if not files.exists(f"{files.tracefs()}events/{event}"):
                raise CliError(
                    f"{escape_for_terminal(name)}: no such event, the command wasn't run (events/ has all)"
                )
            if self.as_json:
                path = Path(directory, files.tracefs(), "events", event, "format")
                self._layouts.setdefault(event.rpartition("/")[2], []).append(layout(path.read_text()))
        settings = [
            Line(f"filter of {name}", 0, self._setting(event, "filter", self._filter), self._filter)
            for event, name in self._named()
            if self._filter
        ]
        self._apply(Loader(files), settings)

    def _switch_on(self, files: Files, reader: int) -> None:
        """All events; what this process and the `reader` of records do isn't traced."""
        from kprobefs.definitions.loader import Loader
        from kprobefs.definitions.syntax import Line

        own = Line("trace", 0, f"instances/{self._name}/set_event_notrace_pid = {os.getpid()} {reader}")
        switches = [
            Line("trace", 0, self._setting(event, "enable", "1"), name) for event, name in self._named()
        ]
        self._apply(Loader(files), [own, *switches])

    def _setting(self, event: str, file: str, value: str) -> str:
        return f"instances/{self._name}/events/{event}/{file} = {value}"

    def _named(self) -> list[tuple[str, str]]:
        """The events, and what they are called in messages."""
        return [(event, event.removeprefix(f"{self._name}/").replace("/", ":")) for event in self._events]

    def _apply(self, loader: Loader, lines: Sequence[Line]) -> None:
        """Raises: CliError."""
        if failed := loader.apply(lines):
            print("\n".join(failed), file=sys.stderr)
            raise CliError("the probes can't be defined, the command wasn't run")

    def _stream(self, instance: Path, command: int) -> NoReturn:
        """Pass records on until the descriptor `command` says that it has ended, and there are no more."""
        status = 0
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            pipe = os.open(instance / "trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
            waiting = select.poll()
            for descriptor in (pipe, command):
                waiting.register(descriptor, select.POLLIN)
            has_ended = False
            is_empty = True
            while not has_ended:
                has_ended = command in dict(waiting.poll())
                with suppress(BlockingIOError):
                    while data := os.read(pipe, READ_SIZE):
                        is_empty = False
                        try:
                            self._show(data.decode("utf-8", "surrogateescape"))
                        except BrokenPipeError:
                            # Who reads has enough.
                            os._exit(0)
                        except OSError as error:
                            os._exit(UNWRITTEN + (error.errno or 0))
            status = NOTHING if is_empty else 0
        # This is a forked copy: nothing may get back into its frames. The mount may end before.
        finally:
            os._exit(status)

    def _show(self, text: str) -> None:
        # Not splitlines(): a name may have what else ends lines.
        for line in text.removesuffix("\n").split("\n"):
            self._output.write(f"{self._line(line)}\n")
        self._output.flush()

    def _line(self, line: str) -> str:
        found = LINE.match(line)
        if self.as_json:
            return json.dumps(record(line, self._layouts))
        text = terminal.wrap(escape_for_terminal(line), self._output, "    ")
        if found is None or not self._colours:
            return text
        return text.replace(f" {found['event']}: ", f" \033[36m{found['event']}\033[0m: ", 1)

    def _remove(self, tracefs: Path, instance: Path) -> None:
        _remove(tracefs, instance, [each.split()[0].partition(":")[2] for each in self._definitions])


def own_name() -> str:
    """Of this process's instance and group: its pid, when it started, and the pid namespace that knows it."""
    pid = os.getpid()
    return f"trace_{pid}_{start_time(pid):x}_{os.stat(PID_NAMESPACE).st_ino:x}"


def sweep(files: Files, tracefs: Path) -> None:
    """Remove what one-liners that were killed have left on a mount; others may be at it too."""
    with suppress(OSError):
        root = files.tracefs()
        groups = files.directories(f"{root}events")
        for name in filter(_is_dead, {*groups, *files.directories(f"{root}instances")}):
            with suppress(OSError):
                events = files.directories(f"{root}events/{name}") if name in groups else []
                _remove(tracefs, tracefs / "instances" / name, [f"{name}/{event}" for event in events])


def _is_dead(name: str) -> bool:
    """Whether it is of a process of this pid namespace that is no more."""
    found = NAME.fullmatch(name)
    if found is None or int(found["namespace"], 16) != os.stat(PID_NAMESPACE).st_ino:
        return False
    try:
        os.kill(int(found["pid"]), 0)
    except ProcessLookupError:
        return True
    # Another user's lives, and may hide when it started.
    except OSError:
        pass
    with suppress(OSError, IndexError):
        return start_time(int(found["pid"])) != int(found["started"], 16)
    return False


def _remove(tracefs: Path, instance: Path, events: Sequence[str]) -> None:
    with suppress(OSError):
        instance.rmdir()
    for event in events:
        with suppress(OSError):
            descriptor = os.open(tracefs / "dynamic_events", os.O_WRONLY | os.O_APPEND)
            try:
                os.write(descriptor, f"-:{event}\n".encode())
            finally:
                os.close(descriptor)


def layout(text: str) -> Layout:
    """How lines of the event with this format file read: a pattern, and name and conversion of each group.

    A name is what stands in front of a "=", or the entry's where each value is a whole field.
    """
    found = PRINT_FMT.search(text)
    if found is None:
        return re.compile("(?!)"), []
    # In turns: what stands in front of a conversion, and its last letters.
    *parts, rest = CONVERSION.split(re.sub(r"\\(.)", r"\1", found[1]))
    entry = re.findall(r"REC->(\w+)", found[2])
    is_plain = len(entry) == len(parts) // 2 and "{" not in found[1]
    pattern = ""
    fields = []
    for number, (literal, conversion) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        if number and not literal:
            continue
        named = re.search(r'(\w+)="?(?:0x)?$', literal)
        name = named[1] if named else entry[number] if is_plain else ""
        fields.append(("" if name.startswith("__") else name, conversion))
        pattern += re.escape(literal) + (r"(\S+?)" if conversion[0] in NUMBERS else "(.*?)")
    return re.compile(f"{pattern}{re.escape(rest)}"), fields


def record(line: str, layouts: Layouts) -> dict[str, object]:
    """A line of trace_pipe as an object; one that isn't a record has its text alone.

    `layouts`: those of the events with a name. What isn't as they say has the fields that a "=" tells of.
    """
    fields: dict[str, object] = {}
    if call := CALL.match(line):
        kind = "exit" if call["arguments"] is None else "enter"
        fields = (
            {"ret": _signed(int(call["result"], 16))} if call["result"] else _arguments(call["arguments"])
        )
        line = f"{call['before']}sys_{kind}_{call['name']}: sys_{call['name']}{call['text']}"
    found = LINE.match(line)
    if found is None:
        return {"text": line}
    if call is None:
        fields = {name: _value(text) for name, text in FIELD.findall(found["text"])}
        for pattern, names in layouts.get(found["event"], ()):
            if values := pattern.fullmatch(found["text"]):
                named = set(re.findall(r"(\w+)=", pattern.pattern))
                fields = {name: value for name, value in fields.items() if name in named}
                told: dict[str, list[int | str]] = {}
                for (name, conversion), text in zip(names, values.groups(), strict=True):
                    told.setdefault(name, []).append(_converted(text, conversion))
                fields |= {name: each if each[1:] else each[0] for name, each in told.items() if name}
    return {
        "time": float(found["time"]),
        "cpu": int(found["cpu"]),
        "pid": int(found["pid"]),
        "comm": found["comm"],
        "event": found["event"],
        "fields": fields,
        "text": found["text"],
    }


def _arguments(text: str) -> dict[str, object]:
    """Of a system call; numbers are hexadecimal, without saying so."""
    pairs = (each.partition(": ") for each in text.split(", ") if each)
    # Option verbose has the type in front of the name.
    return {name.rpartition(" ")[2]: _converted(value, "x") for name, _, value in pairs}


def _converted(text: str, conversion: str) -> int | str:
    if conversion[0] in NUMBERS:
        with suppress(ValueError):
            return int(text, 16 if conversion == "x" else 10)
    return text


def _signed(word: int) -> int:
    return word - (word >> 63 << 64)


def _value(text: str) -> int | str:
    if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", text):
        return int(text, 0) if "x" in text else int(text)
    return text[1:-1] if text.startswith('"') else text


@contextmanager
def _copies(command: Sequence[str], scratch: Path) -> Iterator[str]:
    """scratch/, with the regular files there that a command's arguments name by paths without "..".

    What of it the command has changed is told of: the copies go.
    """
    copied: dict[Path, Path] = {}
    made: list[Path] = []
    try:
        for word in command[1:]:
            source = Path(word)
            target = scratch / word
            if source.is_absolute() or ".." in source.parts:
                continue
            # A script that a shell is given may be longer than any name.
            if not os.path.isfile(source) or os.path.lexists(target):
                continue
            for directory in reversed(target.parents):
                if scratch in directory.parents and not directory.exists():
                    directory.mkdir()
                    made.append(directory)
            copied[target] = source
            shutil.copyfile(source, target)
        yield str(scratch)
        changed = [target for target, source in copied.items() if _differ(source, target)]
        _tell_of([str(target.relative_to(scratch)) for target in changed], "changed in scratch/ alone")
    finally:
        for target in copied:
            target.unlink(missing_ok=True)
        for directory in reversed(made):
            with suppress(OSError):
                directory.rmdir()


def tell_of_results(scratch: Path) -> None:
    """What a command has left in a scratch/ that goes."""
    with suppress(OSError):
        _tell_of(sorted(os.listdir(scratch)), "made in scratch/, which goes with this mount")


def _differ(one: Path, two: Path) -> bool:
    with suppress(OSError):
        return not filecmp.cmp(one, two, shallow=False)
    return False


def _tell_of(names: Sequence[str], what: str) -> None:
    """In one line, where there are any."""
    more = f" and {len(names) - NAMES} more" if len(names) > NAMES else ""
    if names:
        told = f"{', '.join(names[:NAMES])}{more}: {what}; what is written to an absolute path stays"
        print(f"kprobefs: {escape_for_terminal(told)}", file=sys.stderr)


def _why_nothing(command: Sequence[str], scratch: Path) -> str:
    """For people."""
    if not scratch.is_dir():
        return "nothing was recorded: this mount has no scratch/, so no file of the command's is its kernel's"
    hosts = [
        escape_for_terminal(word) for word in command[1:] if os.path.isabs(word) and os.path.isfile(word)
    ]
    named = f", such as {hosts[0]}," if hosts else ""
    return f"nothing was recorded: what is done to files outside of scratch/{named} hits no probe"
