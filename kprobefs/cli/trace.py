"""`kprobefs trace`: define probes, run a command, show the records, and remove the probes."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO

from kprobefs.cli.scratch_copies import copies_of_arguments, why_nothing
from kprobefs.cli.trace_records import RecordPrinter
from kprobefs.common.daemon_registry import start_time
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal

if TYPE_CHECKING:
    from kprobefs.definitions.tracefs_files import Files

PROBE = re.compile(r"(?P<kind>[pr]\d*|f\d*):(?P<place>\S+)(?P<arguments>(?:\s.*)?)$")
NAME = re.compile(r"trace_(?P<pid>\d{1,9})_(?P<started>[0-9a-f]{1,16})_(?P<namespace>[0-9a-f]{1,16})")
"""Name of the instance and of the group of probes of one session; own_name() makes it."""
PID_NAMESPACE = "/proc/self/ns/pid"
EVENT = re.compile(r"t:(?P<group>\w+)[:/](?P<event>\w+)$")
READ_SIZE = 1 << 16
NOTHING = 3
"""Exit status of a RecordReader's process that has read no records."""
UNWRITTEN = 100
"""Added to an errno, the exit status of a RecordReader's process that could not write records."""
USAGE = "p:PLACE [NAME=ARGUMENT...], r:PLACE [...], or t:GROUP:EVENT"
"""Forms of a probe on the command line."""


def named(probes: Sequence[str], group: str) -> tuple[list[str], list[str]]:
    """Return the lines that define the probes, and the names of all events as group/name.

    `probes`: probes in the forms of USAGE. `group`: group of the events that the lines define.
    Raises: CliError (an item is not a probe).
    """
    definitions: list[str] = []
    events: list[str] = []
    for text in probes:
        if event := EVENT.match(text):
            events.append(f"{event['group']}/{event['event']}")
            continue
        probe = PROBE.match(text)
        if probe is None:
            raise CliError(f"{escape_for_terminal(text)!r} is not a probe; use {USAGE}", ExitStatus.USAGE)
        base = re.sub(r"\W", "_", probe["place"].rpartition(":")[2])[:40]
        name = base
        while f"{group}/{name}" in events:
            name = f"{base}_{len(events)}"
        events.append(f"{group}/{name}")
        definitions.append(f"{probe['kind']}:{group}/{name} {probe['place']}{probe['arguments']}")
    return definitions, events


class TraceSession:
    """Probes, filter and output of one run of `kprobefs trace`; attached() puts the probes on a mount."""

    def __init__(self, probes: Sequence[str], filter_text: str, output: TextIO, *, as_json: bool) -> None:
        """Parse the probes. Raises: CliError (wrong usage)."""
        self.name = own_name()
        self.definitions, self.events = named(probes, self.name)
        self.filter = filter_text
        self.as_json = as_json
        self.printer = RecordPrinter(output, as_json=as_json)

    def attached(self, directory: str, command: Sequence[str]) -> AttachedProbes:
        """Return a context manager that adds the probes to the mount at `directory` while `command` runs."""
        return AttachedProbes(self, directory, command)


class AttachedProbes:
    """Context manager that adds a session's probes to a mount, and removes them at its end.

    The probes record into a trace instance of their own. Entering the context returns the directory in which
    the command must run: scratch/ of the mount, whose files belong to the guest. If the mount has no
    scratch/, the directory is the current one. Inside the context, scratch/ contains copies of the files that
    the command's arguments name.
    """

    def __init__(self, session: TraceSession, directory: str, command: Sequence[str]) -> None:
        from kprobefs.definitions.tracefs_files import HostFiles

        self._session = session
        self._directory = directory
        self._command = command
        self._files: Files = HostFiles(directory)
        self._scratch = Path(directory, "scratch")
        self._undo = ExitStack()

    def __enter__(self) -> str:
        """Define and enable the probes. Raises: CliError (in that case no probe is left)."""
        session = self._session
        tracefs = Path(self._directory, self._files.tracefs())
        instance = tracefs / "instances" / session.name
        has_scratch = self._scratch.is_dir()
        with ExitStack() as undo:
            place = undo.enter_context(
                copies_of_arguments(self._command, self._scratch) if has_scratch else nullcontext(os.getcwd())
            )
            sweep(self._files, tracefs)
            undo.callback(_remove, tracefs, instance, _names_of(session.definitions))
            instance.mkdir()
            self._define()
            self._set_filters()
            reader = RecordReader(instance, session.printer)
            undo.push(lambda kind, _error, _trace: self._stop(instance, reader, has_failed=kind is not None))
            self._switch_on(reader.pid)
            self._undo = undo.pop_all()
        return place

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the remaining records, and remove the probes and the instance."""
        self._undo.__exit__(kind, error, trace)

    def _define(self) -> None:
        definitions = self._session.definitions
        self._apply([("trace", text, re.sub(r":\S+ ", ":", text, count=1)) for text in definitions])
        root = self._files.tracefs()
        for event, name in self._named():
            if not self._files.exists(f"{root}events/{event}"):
                raise CliError(
                    f"{escape_for_terminal(name)}: no such event, so the command was not run; see events/"
                )
            if self._session.as_json:
                path = Path(self._directory, root, "events", event, "format")
                self._session.printer.add_layout(event.rpartition("/")[2], path.read_text())

    def _set_filters(self) -> None:
        text = self._session.filter
        if text:
            self._apply(
                [
                    (f"filter of {name}", self._setting(event, "filter", text), text)
                    for event, name in self._named()
                ]
            )

    def _switch_on(self, reader: int) -> None:
        """Enable all events, and exclude this process and the `reader` of records from tracing."""
        no_pids = f"instances/{self._session.name}/set_event_notrace_pid = {os.getpid()} {reader}"
        switches = [("trace", self._setting(event, "enable", "1"), name) for event, name in self._named()]
        self._apply([("trace", no_pids, ""), *switches])

    def _setting(self, event: str, file: str, value: str) -> str:
        return f"instances/{self._session.name}/events/{event}/{file} = {value}"

    def _named(self) -> list[tuple[str, str]]:
        """Return pairs of an event, as group/name, and its name in messages."""
        prefix = f"{self._session.name}/"
        return [(event, event.removeprefix(prefix).replace("/", ":")) for event in self._session.events]

    def _apply(self, lines: Sequence[tuple[str, str, str]]) -> None:
        """Apply lines to the mount's files.

        An item of `lines` has the name that messages give to the line, the line, and the user's own text.
        Raises: CliError.
        """
        from kprobefs.definitions.loader import Loader
        from kprobefs.definitions.syntax import Line

        loader = Loader(self._files)
        if failed := loader.apply([Line(place, 0, text, typed) for place, text, typed in lines]):
            print("\n".join(failed), file=sys.stderr)
            raise CliError("the probes can't be defined, so the command was not run")

    def _stop(self, instance: Path, reader: RecordReader, *, has_failed: bool) -> None:
        for event in self._session.events:
            with suppress(OSError):
                (instance / "events" / event / "enable").write_text("0")
        status = reader.finish()
        if has_failed:
            return
        if status > UNWRITTEN:
            name = escape_for_terminal(self._session.printer.output.name)
            why = os.strerror(status - UNWRITTEN)
            print(f"kprobefs: {name}: {why}: records are missing", file=sys.stderr)
        elif status == NOTHING:
            print(f"kprobefs: {why_nothing(self._command, self._scratch)}", file=sys.stderr)


class RecordReader:
    """A child process that prints the records of an instance as they arrive.

    The reader is not a thread, because this process must not have threads when it forks the command.
    """

    def __init__(self, instance: Path, printer: RecordPrinter) -> None:
        self._printer = printer
        ended, self._writer = os.pipe()
        printer.output.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writer)
            self._serve(instance, ended)
        os.close(ended)

    def finish(self) -> int:
        """Let the process print the remaining records and end; return its exit status."""
        os.close(self._writer)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _serve(self, instance: Path, ended: int) -> NoReturn:
        """Print records until the pipe `ended` is closed and no records are left; end the process."""
        status = 0
        # Hazard: this is a forked copy, so no exception may reach the callers. The mount may end earlier.
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            status = self._show_all(instance, ended)
        finally:
            os._exit(status)

    def _show_all(self, instance: Path, ended: int) -> int:
        pipe = os.open(instance / "trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
        waiting = select.poll()
        for descriptor in (pipe, ended):
            waiting.register(descriptor, select.POLLIN)
        has_ended = False
        is_empty = True
        while not has_ended:
            has_ended = ended in dict(waiting.poll())
            with suppress(BlockingIOError):
                while data := os.read(pipe, READ_SIZE):
                    is_empty = False
                    try:
                        self._printer.show(data.decode("utf-8", "surrogateescape"))
                    except BrokenPipeError:
                        # The reader of the records has closed the pipe.
                        return 0
                    except OSError as error:
                        return UNWRITTEN + (error.errno or 0)
        return NOTHING if is_empty else 0


def own_name() -> str:
    """Return the name of this session: this process's pid, start time and inode of its pid namespace."""
    pid = os.getpid()
    return f"trace_{pid}_{start_time(pid):x}_{os.stat(PID_NAMESPACE).st_ino:x}"


def sweep(files: Files, tracefs: Path) -> None:
    """Remove probes and instances that killed `kprobefs trace` processes have left.

    `files`: the mount's files. `tracefs`: path of its tracefs. Other processes may do the same meanwhile.
    """
    with suppress(OSError):
        root = files.tracefs()
        groups = files.directories(f"{root}events")
        for name in filter(_is_dead, {*groups, *files.directories(f"{root}instances")}):
            with suppress(OSError):
                events = files.directories(f"{root}events/{name}") if name in groups else []
                _remove(tracefs, tracefs / "instances" / name, [f"{name}/{event}" for event in events])


def _is_dead(name: str) -> bool:
    """Return True if `name` is the name of a session whose process, in this pid namespace, has ended."""
    found = NAME.fullmatch(name)
    if found is None or int(found["namespace"], 16) != os.stat(PID_NAMESPACE).st_ino:
        return False
    try:
        os.kill(int(found["pid"]), 0)
    except ProcessLookupError:
        return True
    # The process of another user lives, and its start time may be hidden.
    except OSError:
        pass
    with suppress(OSError, IndexError):
        return start_time(int(found["pid"])) != int(found["started"], 16)
    return False


def _names_of(definitions: Sequence[str]) -> list[str]:
    """Return the names, as group/name, of the events that the lines `definitions` define."""
    return [each.split()[0].partition(":")[2] for each in definitions]


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
