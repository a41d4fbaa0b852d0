"""`kprobefs trace`: define probes, run a command, show the records, and remove the probes."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from difflib import get_close_matches
from errno import EINVAL, ENOENT
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO

from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.cli.scratch_copies import copies_of_arguments, why_nothing
from kprobefs.cli.trace_output import TextOutput, TraceFiles, TraceOutput, output_of
from kprobefs.cli.trace_syntax import AskedProbe, free_name, parse_probes
from kprobefs.common.daemon_registry import start_time
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal

if TYPE_CHECKING:
    from kprobefs.definitions.tracefs_files import Files

NAME = re.compile(r"trace_(?P<pid>\d{1,9})_(?P<started>[0-9a-f]{1,16})_(?P<namespace>[0-9a-f]{1,16})")
"""Pattern for the name of a session's instance and group of probes, which own_name() returns."""
SYMBOL = re.compile(r"[A-Za-z_][\w.]*")
PREFIXES = (4, 2)
"""Lengths of the common prefix of a wrong name and a similar symbol; the greater is tried first."""
MAX_NEAREST = 3
"""Maximum number of similar symbols that a message names."""
PID_NAMESPACE = "/proc/self/ns/pid"
NOTHING = 3
"""Exit status of a RecordReader's process that has read no records."""
UNWRITTEN = 100
"""Exit status of a RecordReader's process that could not write records, minus the errno of the failure."""


@dataclass(frozen=True)
class TraceRequest:
    """The trace that the command line requests."""

    probes: Sequence[str] = ()
    filter: str = ""
    output: str | None = None
    """File that gets the records, whose ending selects the kind of file; None: standard output."""
    as_json: bool = False
    has_stacks: bool = False
    """Whether to record the stack at each hit."""
    graph: str | None = None
    """Function whose call graph is recorded, or None."""


class TraceSession:
    """Probes, filter and output of one run of `kprobefs trace`; attached() puts the probes on a mount."""

    def __init__(self, request: TraceRequest, output: TextIO) -> None:
        """Parse the probes. Raises: CliError (wrong usage)."""
        self.name = own_name()
        self.request = request
        self.probes = parse_probes(request.probes, self.name)
        self.events = list(dict.fromkeys(probe.event for probe in self.probes))
        self.output = output
        self.kind = output_of(request.output, as_json=request.as_json)
        self.status: int | None = None
        """Exit status of the command, or None before its end."""
        if not self.probes and request.graph is None:
            raise CliError("trace: no probe given; add PROBE or --graph FUNCTION", ExitStatus.USAGE)

    @property
    def takes_output(self) -> bool:
        """Whether the command's output goes to standard error, because the records need standard output."""
        return self.request.output is None and self.kind is not TextOutput

    @property
    def has_stacks(self) -> bool:
        """Whether the stack is recorded at each hit."""
        return self.request.has_stacks or (self.kind.needs_stacks and self.request.graph is None)

    @property
    def shows_durations(self) -> bool:
        """Whether the output has durations: those of a call graph, or those of slices."""
        returns = self.kind.needs_entries and any(probe.is_return for probe in self.probes)
        return returns or self.request.graph is not None

    def entries(self) -> dict[str, AskedProbe]:
        """Return the hidden probes that the output needs: name of an event -> probe.

        There are two for each probed return: at the function's entry and at its return. The one at the entry
        fetches the arguments of the first probe there that the user has given.
        """
        if not self.kind.needs_entries:
            return {}
        found: dict[str, AskedProbe] = {}
        given = {
            probe.place: (probe.typed, " ".join(probe.definition.split()[2:]))
            for probe in reversed(self.probes)
            if probe.definition and not probe.is_return
        }
        taken = set(self.events)
        for place in dict.fromkeys(probe.place for probe in self.probes if probe.is_return):
            function = place.removesuffix("%return")
            for kind in ("p", "r"):
                name = free_name(f"{kind}_{function.rpartition(':')[2]}", self.name, taken)
                event = f"{self.name}/{name}"
                taken.add(event)
                typed, arguments = given.get(function, ("", "")) if kind == "p" else ("", "")
                line = f"{kind}:{event} {function} {arguments}".rstrip()
                found[name] = AskedProbe(typed or f"{kind}:{function}", event, line, function, kind == "r")
        return found

    def attached(self, directory: str, command: Sequence[str]) -> AttachedProbes:
        """Return a context manager that keeps the probes on the mount at `directory` while `command` runs."""
        return AttachedProbes(self, directory, command)


class AttachedProbes:
    """Context manager that adds a session's probes to a mount, and removes them at its end.

    The probes record into a trace instance of their own, or with a call graph into the top-level trace array.
    Entering the context returns the directory in which the command must run: scratch/ of the mount, whose
    files belong to the guest. If the mount has no scratch/, the directory is the current one. Inside the
    context, scratch/ contains copies of the files that the command's words name.
    """

    def __init__(self, session: TraceSession, directory: str, command: Sequence[str]) -> None:
        from kprobefs.definitions.tracefs_files import HostFiles, control_root

        self._session = session
        self._directory = directory
        self._command = command
        self._files: Files = HostFiles(directory)
        self._scratch = Path(directory, "scratch")
        self._tracefs = Path(directory, self._files.tracefs())
        self._array = "" if session.request.graph else f"instances/{session.name}/"
        """Directory of the trace array that records the hits, relative to the tracefs."""
        self._hidden = session.entries()
        self._kallsyms = control_root(directory) / "machine" / "kallsyms"
        self._undo = ExitStack()

    def __enter__(self) -> str:
        """Define and enable the probes. Raises: CliError (in that case no probe is left)."""
        session = self._session
        instance = self._tracefs / "instances" / session.name
        has_scratch = self._scratch.is_dir()
        with ExitStack() as undo:
            place = undo.enter_context(
                copies_of_arguments(self._command, self._scratch) if has_scratch else nullcontext(os.getcwd())
            )
            sweep(self._files, self._tracefs)
            probes = [*self._hidden.values(), *session.probes]
            defined = [probe for probe in probes if probe.definition]
            undo.callback(_remove, self._tracefs, instance, [probe.event for probe in defined])
            instance.mkdir()
            self._define(defined)
            self._set_filters()
            self._set_tracer()
            output = self._prepared_output()
            reader = RecordReader(self._tracefs / self._array, output)
            undo.push(lambda kind, _error, _trace: self._stop(reader, has_failed=kind is not None))
            self._switch_on(reader.pid)
            self._undo = undo.pop_all()
        return place

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the remaining records, and remove the probes and the instance."""
        self._undo.__exit__(kind, error, trace)

    def _define(self, probes: Sequence[AskedProbe]) -> None:
        self._apply(
            [("trace", probe.definition, probe.typed) for probe in probes],
            {probe.typed: probe for probe in probes},
        )
        for event, name in self._named():
            if not self._files.exists(f"{self._files.tracefs()}events/{event}"):
                raise CliError(
                    f"{escape_for_terminal(name)}: no such event, so the command was not run; see events/"
                )

    def _advice(self, probe: AskedProbe) -> str:
        """Return advice about a probe that the kernel refused: similar symbols, or the text's meaning."""
        symbol = re.split(r"[+%]", probe.place, maxsplit=1)[0]
        return self._nearest(symbol) or f"understood as {escape_for_terminal(probe.understood)}"

    def _prepared_output(self) -> TraceOutput:
        """Return the output, prepared with the formats of the events and the pairs of entry and return."""
        session = self._session
        places = {probe.place: name for name, probe in self._hidden.items() if not probe.is_return}
        returns = {
            probe.event.partition("/")[2]: places[probe.place.removesuffix("%return")]
            for probe in (*session.probes, *self._hidden.values())
            if probe.is_return and places
        }
        events = self._events()
        formats = {event: (self._tracefs / "events" / event / "format").read_text() for event in events}
        files = TraceFiles(
            self._tracefs,
            self._tracefs / self._array,
            self._kallsyms,
            formats,
            returns,
            {place: probe.place.rpartition(":")[2] for place, probe in self._hidden.items()},
            set(self._hidden),
        )
        output = session.kind(session.output, files)
        output.prepare()
        return output

    def _events(self) -> list[str]:
        """Return the names of all events as group/name, the hidden events first."""
        return [*(probe.event for probe in self._hidden.values()), *self._session.events]

    def _set_filters(self) -> None:
        text = self._session.request.filter
        if text:
            self._apply(
                [
                    (f"filter of {name}", self._setting(event, "filter", text), text)
                    for event, name in self._named()
                ]
            )
            for event, _ in self._named():
                # It counts the hits that the filter does not accept, for the final message.
                with suppress(OSError):
                    (self._tracefs / self._array / "events" / event / "trigger").write_text(
                        "hist:keys=common_pid"
                    )

    def _set_tracer(self) -> None:
        """Select the tracer of the call graph, if one is wanted.

        That is possible only before trace_pipe is opened.
        """
        graph = self._session.request.graph
        if graph is not None:
            options = [f"options/{name} = 1" for name in self._session.kind.graph_options]
            self._set_graph(graph)
            lines = ["tracing_on = 0", "current_tracer = function_graph", *options]
            self._apply([("trace", line, "") for line in lines])

    def _set_graph(self, graph: str) -> None:
        """Select the function of the call graph. Raises: CliError."""
        try:
            self._files.write(f"{self._files.tracefs()}set_graph_function", f"{graph}\n")
        except OSError as error:
            # Linux: EINVAL if no function has the name or matches the pattern.
            why = str(error.strerror)
            if error.errno == EINVAL:
                remedy = self._nearest(graph) or "see available_filter_functions"
                why = f"no such function can be traced; {remedy}"
            elif error.errno == ENOENT:
                why = "the kernel has no function graph; use a kernel or a --profile with ftrace"
            raise CliError(f"--graph {escape_for_terminal(graph)}: {why}") from None

    def _nearest(self, name: str) -> str:
        """Return a text that names the symbols that are most similar to `name`, or "" if none is similar."""
        known: set[str] = set()
        with suppress(OSError):
            symbols = (line.split()[2:3] for line in self._kallsyms.read_text().splitlines())
            known = {word for words in symbols for word in words}
        if name in known or not SYMBOL.fullmatch(name):
            return ""
        for length in PREFIXES:
            begun = sorted(each for each in known if each.startswith(name[:length]))
            if found := get_close_matches(name, begun, MAX_NEAREST):
                return f"nearest: {', '.join(map(escape_for_terminal, found))}"
        return ""

    def _switch_on(self, reader: int) -> None:
        """Enable all events, and exclude this process and the `reader` of records from tracing."""
        session = self._session
        pids = f"{os.getpid()} {reader}"
        lines = [f"{self._array}set_event_notrace_pid = {pids}"]
        if session.request.graph is not None:
            lines += [f"set_ftrace_notrace_pid = {pids}", "tracing_on = 1"]
        if session.has_stacks:
            lines.append(f"{self._array}options/stacktrace = 1")
        self._apply([("trace", line, "") for line in lines])
        for event in self._events():
            name = event.removeprefix(f"{session.name}/").replace("/", ":")
            self._apply([("trace", self._setting(event, "enable", "1"), name)])

    def _setting(self, event: str, file: str, value: str) -> str:
        return f"{self._array}events/{event}/{file} = {value}"

    def _named(self) -> list[tuple[str, str]]:
        """Return pairs of an event, as group/name, and its name in messages."""
        prefix = f"{self._session.name}/"
        return [(event, event.removeprefix(prefix).replace("/", ":")) for event in self._session.events]

    def _apply(
        self, lines: Sequence[tuple[str, str, str]], probes: Mapping[str, AskedProbe] | None = None
    ) -> None:
        """Apply lines to the mount's files.

        An item of `lines` has the name that messages give to the line, the line, and the user's own text.
        `probes`: the user's text -> the probe. Raises: CliError.
        """
        from kprobefs.definitions.loader import Loader
        from kprobefs.definitions.syntax import Line

        loader = Loader(self._files)
        if failed := loader.apply([Line(place, 0, text, typed) for place, text, typed in lines]):
            # A hidden probe has the arguments of a probe that the user has given, and fails as that one does.
            for message in dict.fromkeys(failed):
                print(message, file=sys.stderr)
                for typed, probe in (probes or {}).items():
                    if message.split("\n")[1:2] == [f"    {escape_for_terminal(typed)}"]:
                        print(f"    {self._advice(probe)}", file=sys.stderr)
            raise CliError("the probes can't be defined, so the command was not run")

    def _stop(self, reader: RecordReader, *, has_failed: bool) -> None:
        for event in self._events():
            with suppress(OSError):
                (self._tracefs / self._array / "events" / event / "enable").write_text("0")
        if self._session.request.graph is not None:
            with suppress(OSError):
                (self._tracefs / "tracing_on").write_text("0")
        status = reader.finish()
        if has_failed:
            return
        if status > UNWRITTEN:
            name = escape_for_terminal(self._session.output.name)
            why = os.strerror(status - UNWRITTEN)
            print(f"kprobefs: {name}: {why}: records are missing", file=sys.stderr)
        elif status == NOTHING:
            print(f"kprobefs: nothing was recorded: {self._why_nothing(reader.pid)}", file=sys.stderr)
        else:
            self._report()

    def _report(self) -> None:
        """Print the file that was written, for a terminal, and a hint if its durations are virtual."""
        session = self._session
        if session.request.output is not None and sys.stderr.isatty():
            print(f"kprobefs: wrote {escape_for_terminal(session.request.output)}", file=sys.stderr)
        if session.shows_durations:
            from kprobefs.cli.duration_hint import HINT, follows_virtual_clock

            if follows_virtual_clock(self._directory):
                print(f"kprobefs: {HINT.format(where='in this trace')}", file=sys.stderr)

    def _why_nothing(self, reader: int) -> str:
        """Return a text with the reason why there are no records. `reader`: pid of the reader of records."""
        session = self._session
        if session.request.filter and (hits := self._unfiltered({os.getpid(), reader})):
            return f"the filter accepted none of {hits} hit{'s' * (hits > 1)}"
        if session.status:
            return f"the command ended with status {session.status} before a probe was hit"
        places = [probe.place or probe.event.replace("/", ":") for probe in session.probes]
        if session.request.graph is not None:
            places.append(session.request.graph)
        return why_nothing(self._command, self._scratch, places)

    def _unfiltered(self, own: set[int]) -> int:
        """Return the number of hits in all processes except `own`, including hits that the filter drops."""
        found = 0
        for event in self._session.events:
            with suppress(OSError):
                text = (self._tracefs / self._array / "events" / event / "hist").read_text()
                for pid, hits in re.findall(r"common_pid: +(\d+).*hitcount: +(\d+)", text):
                    found += 0 if int(pid) in own else int(hits)
        return found


class RecordReader:
    """A child process that writes the records of a trace array as they arrive.

    The reader is not a thread, because this process must not have threads when it forks the command.
    """

    def __init__(self, array: Path, output: TraceOutput) -> None:
        self._output = output
        ended, self._writer = os.pipe()
        output.output.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._writer)
            self._serve(array, ended)
        os.close(ended)

    def finish(self) -> int:
        """Make the process write the remaining records and end. Return its exit status."""
        os.close(self._writer)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _serve(self, array: Path, ended: int) -> NoReturn:
        """Write records until the pipe `ended` is closed and no records are left; end the process."""
        status = 0
        # Hazard: this is a forked copy, so no exception may reach the callers. The mount may end earlier.
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            status = self._show_all(array, ended)
        finally:
            os._exit(status)

    def _show_all(self, array: Path, ended: int) -> int:
        pipe = os.open(array / "trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
        waiting = select.poll()
        for descriptor in (pipe, ended):
            waiting.register(descriptor, select.POLLIN)
        has_ended = False
        try:
            while not has_ended:
                has_ended = ended in dict(waiting.poll())
                self._output.read(pipe)
            self._output.close()
        except BrokenPipeError:
            # The reader of the records has closed the pipe.
            return 0
        except OSError as error:
            return UNWRITTEN + (error.errno or 0)
        return NOTHING if self._output.is_empty else 0


def own_name() -> str:
    """Return the name of this session, which contains this process's pid, start time and pid namespace."""
    pid = os.getpid()
    return f"trace_{pid}_{start_time(pid):x}_{os.stat(PID_NAMESPACE).st_ino:x}"


def sweep(files: Files, tracefs: Path) -> None:
    """Remove probes and instances that killed `kprobefs trace` processes have left.

    `files`: the mount's files. `tracefs`: path of its tracefs. Other processes may call this function at the
    same time.
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
