"""`kprobefs trace`: define probes, run a command, show the records, and remove the probes."""

from __future__ import annotations

import os
import re
import select
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, TextIO

from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.cli.nothing_hint import (
    UNARMED,
    EndedCommand,
    History,
    counted,
    profile_counts,
    switched_off,
    why_missed,
    why_no_hit,
)
from kprobefs.cli.scratch_copies import copies_of_arguments
from kprobefs.cli.trace_graph import SUFFIX, GraphTracer, reset
from kprobefs.cli.trace_output import TextOutput, TraceFiles, TraceOutput, output_of
from kprobefs.cli.trace_syntax import AskedProbe, free_name, parse_probes
from kprobefs.common.daemon_registry import running, start_time
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal
from kprobefs.common.similar_symbols import nearest_listed
from kprobefs.mount_options import KERNEL_KPROBES

if TYPE_CHECKING:
    from kprobefs.common.output_file import OutputFile
    from kprobefs.definitions.tracefs_files import Files

NAME = re.compile(
    r"trace_(?P<pid>\d{1,9})_(?P<started>[0-9a-f]{1,16})_(?P<namespace>[0-9a-f]{1,16})"
    rf"(?P<graph>{SUFFIX})?"
)
"""Pattern for the name of a session. Its trace instance and its group of probe events have the same name.

The name is what own_name() returns, followed by SUFFIX if the session records a call graph.
"""
NOTRACE = "set_event_notrace_pid"
"""Name of a trace array's file that lists the pids of the tasks whose events are not recorded."""
MARKER = "trace_marker"
MARKED = re.compile(r"-(\d+) +\[.*tracing_mark_write: (?:own|reader)$", re.MULTILINE)
"""Pattern for a line of `trace` with a marker that this session wrote; its group is the pid of the writer."""
PATH_SIZE = 4096
"""Maximum size in bytes of a path, including the NUL at its end."""
PID_NAMESPACE = "/proc/self/ns/pid"
NOTHING = 3
"""Exit status of a RecordReader's process that has read no records."""
UNWRITTEN = 100
"""Base of an exit status: a reader's process that cannot read or write ends with UNWRITTEN + errno."""


ONE_FILTER = "-f filters all probes; a filter of one probe is at its end: 'r:PLACE ret=$retval if ret > 0'"
"""Advice that is printed if a filter is refused and option -f has given one filter for several events."""


@dataclass(frozen=True)
class TraceRequest:
    """The trace that the command line requests."""

    probes: Sequence[str] = ()
    filter: str = ""
    output: str | None = None
    """Path of the file that gets the records; its ending selects the format. None: standard output."""
    as_json: bool = False
    has_stacks: bool = False
    """Whether to record the stack at each hit."""
    graph: tuple[str, ...] = ()
    """Names of the functions whose call graphs are recorded; empty: no call graph."""


class TraceSession:
    """Probes, filter and output of one run of `kprobefs trace`; attached() puts the probes on a mount."""

    def __init__(self, request: TraceRequest, file: OutputFile | None) -> None:
        """Create a session for `request`, and parse its probes.

        `file` gets the records; None: standard output gets them.

        Raises: CliError (wrong usage).
        """
        self.name = own_name() + (SUFFIX if request.graph else "")
        self.request = request
        self.probes = parse_probes(request.probes, self.name)
        self.events = list(dict.fromkeys(probe.event for probe in self.probes))
        self._file = file
        self.kind = output_of(request.output, as_json=request.as_json)
        self.status: int | None = None
        """Exit status of the command, or None before its end."""
        if not self.probes and not request.graph:
            raise CliError("trace: no probe given; add PROBE or --graph FUNCTION", ExitStatus.USAGE)

    def filters(self) -> dict[str, str]:
        """Return a map from each event, as group/name, to its filter, which is "" if the event has none.

        A probe's own filter takes the place of the filter for all probes.
        """
        own = {probe.event: probe.filter for probe in self.probes if probe.filter}
        return {event: own.get(event, self.request.filter) for event in self.events}

    @property
    def takes_output(self) -> bool:
        """Whether standard output is for the records alone, so the command's output goes to standard error.

        False: the records go to a file, or they are text, which may be mixed with the command's output.
        """
        return self.request.output is None and self.kind is not TextOutput

    @property
    def has_stacks(self) -> bool:
        """Whether the stack is recorded at each hit."""
        return self.request.has_stacks or (self.kind.needs_stacks and not self.request.graph)

    @property
    def shows_durations(self) -> bool:
        """Whether the output has durations: of a call graph, or of probed calls in a Chrome trace."""
        returns = self.kind.needs_entries and any(probe.is_return for probe in self.probes)
        return returns or bool(self.request.graph)

    def output(self) -> TextIO:
        """Return the stream to which the records are written.

        It is the session's output file, whose old content is deleted, or standard output if there is no such
        file.
        """
        return sys.stdout if self._file is None else self._file.stream()

    def entries(self) -> dict[str, AskedProbe]:
        """Return the hidden probes that the output needs: name of an event -> probe.

        The user has not requested these probes. The result is empty if the output needs none.

        For each probed return, there are two hidden probes: one at the function's entry, and one at its
        return. The probe at the entry fetches the arguments of the user's first probe at this entry.
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

    def attached(self, directory: str, command: Sequence[str], *, is_shared: bool) -> AttachedProbes:
        """Return a context manager that keeps the probes on the mount at `directory` while `command` runs.

        `is_shared`: the mount existed before this session, and others may use it; False: the mount ends with
        the command.
        """
        return AttachedProbes(self, directory, command, is_shared=is_shared)


class AttachedProbes:
    """Context manager that adds a session's probes to a mount; at exit, it removes them from a shared mount.

    The probes record into a trace instance of their own. If a call graph is recorded, they record into the
    top-level trace array.

    Entering the context returns the directory in which the command must run. If the mount has scratch/ (whose
    files belong to the guest), the command runs in scratch/ or in a directory there. Copies of the files that
    the command's words name are put into that directory. Without scratch/, the command runs in the current
    directory.
    """

    def __init__(
        self, session: TraceSession, directory: str, command: Sequence[str], *, is_shared: bool
    ) -> None:
        from kprobefs.definitions.tracefs_files import HostFiles, control_root

        self._session = session
        self._is_shared = is_shared
        """Whether the mount existed before this session, and other programs may use it.

        If so, the session must remove all that it adds.
        """
        self._directory = directory
        self._command = command
        self._files: Files = HostFiles(directory)
        self._scratch = Path(directory, "scratch")
        self._own = session.name if is_shared else ""
        """Name of the directory in scratch/ for the copies of the command's files; "" for scratch/ itself."""
        self._place = os.getcwd()
        """Directory in which the command runs."""
        self._tracefs = Path(directory, self._files.tracefs())
        self._array = "" if session.request.graph else f"instances/{session.name}/"
        """Directory of the trace array that records the hits, relative to the tracefs, with a final slash.

        "" means the top-level trace array.
        """
        self._hidden = session.entries()
        self._root = control_root(directory)
        self._kallsyms = self._root / "machine" / "kallsyms"
        self._graph = GraphTracer(self._tracefs) if session.request.graph else None
        self._history: History
        self._own_pids: list[int] = []
        """Pids of this process and of the reader of records, as the guest numbers them."""
        daemon = running(directory)
        self._is_isolated = daemon is not None and daemon.isolate
        self._undo = ExitStack()

    def __enter__(self) -> str:
        """Define and enable the probes, and return the directory in which the command must run.

        Raises: CliError (a probe, a filter or the tracer is refused; no probe is left on a shared mount).
        """
        session = self._session
        instance = self._tracefs / "instances" / session.name
        self._exclude_from_others(os.getpid())
        with ExitStack() as undo:
            if self._scratch.is_dir():
                copies = copies_of_arguments(self._command, self._scratch, self._own)
                self._place = undo.enter_context(copies)
            sweep(self._files, self._tracefs)
            self._history = undo.enter_context(closing(History(self._root)))
            probes = [*self._hidden.values(), *session.probes]
            defined = [probe for probe in probes if probe.definition]
            if self._is_shared:
                undo.callback(_remove, self._tracefs, instance, [probe.event for probe in defined])
            instance.mkdir()
            self._define(defined)
            self._set_filters()
            if self._graph is not None:
                if self._is_shared:
                    undo.callback(self._graph.restore)
                self._prepare_graph(self._graph)
            reader = RecordReader(self._tracefs / self._array, self._output(), at_end=self._is_isolated)
            undo.push(lambda kind, _error, _trace: self._stop(reader, has_failed=kind is not None))
            self._own_pids = self._guest_pids(reader)
            self._switch_on()
            reader.begin()
            self._undo = undo.pop_all()
        return self._place

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Show the remaining records, and remove the probes and the instance from a shared mount."""
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

    def _advice(self, probe: AskedProbe, message: str) -> str:
        """Return advice about a probe that the kernel refused. `message`: the kernel's error.

        The advice is one of these: the kernel has no such kind of event, similar symbols, the command that
        explains the place, or how the text of the probe was understood.
        """
        from kprobefs.cli.refusal_hint import no_such_kind, options_of_mount, place_advice

        if reason := no_such_kind(self._history.read(), probe.definition, self._tracefs):
            return reason
        options = options_of_mount(self._directory)
        if advice := place_advice(probe.place, message, options):
            return escape_for_terminal(advice)
        symbol = re.split(r"[+%]", probe.place, maxsplit=1)[0]
        nearest = self._nearest(symbol)
        understood = f"understood as {escape_for_terminal(probe.understood)}"
        if nearest and probe.names_event:
            # The first word may have been meant as the place.
            return f"{nearest}; {understood}"
        return nearest or understood

    def _output(self) -> TraceOutput:
        """Return the object that writes the records of the session's events.

        The object knows the text of each event's `format` file. For each event at a function's return, it
        also knows the event at the function's entry.
        """
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
        return session.kind(session.output(), files)

    def _events(self) -> list[str]:
        """Return the names of all events as group/name, the hidden events first."""
        return [*(probe.event for probe in self._hidden.values()), *self._session.events]

    def _set_filters(self) -> None:
        filters = self._session.filters()
        named = [(event, name) for event, name in self._named() if filters[event]]
        try:
            self._apply(
                [
                    (
                        f"filter of {name}",
                        self._setting(event, "filter", filters[event]),
                        filters[event],
                    )
                    for event, name in named
                ]
            )
        except CliError:
            if self._session.request.filter and len(self._session.events) > 1:
                print(f"    {ONE_FILTER}", file=sys.stderr)
            raise
        for event, _ in named:
            # The histogram also counts the hits that the filter does not accept, for the final message.
            with suppress(OSError):
                (self._tracefs / self._array / "events" / event / "trigger").write_text(
                    "hist:keys=common_pid"
                )

    def _prepare_graph(self, graph: GraphTracer) -> None:
        """Prepare the tracer `graph` for the functions that the command line names.

        Raises: CliError (another session uses the tracer of this mount), and as GraphTracer.prepare().
        """
        from kprobefs.cli.duration_hint import SLOW_PATCHING, patches_slowly

        session = self._session
        if patches_slowly(self._directory):
            from kprobefs.common.terminal import print_message

            print_message(SLOW_PATCHING)
        for name in self._files.directories(f"{self._files.tracefs()}instances"):
            if name != session.name and name.endswith(SUFFIX) and NAME.fullmatch(name):
                raise CliError(
                    f"trace --graph: another one records on this mount: instances/{name}; wait for it"
                )
        graph.prepare(session.request.graph, session.kind.graph_options, self._nearest)

    def _nearest(self, name: str) -> str:
        """Return a text that names the symbols that are most similar to `name`, or "" if none is similar."""
        with suppress(OSError):
            if found := nearest_listed(name, self._kallsyms.read_text()):
                return f"similar names: {', '.join(map(escape_for_terminal, found))}"
        return ""

    def _guest_pids(self, reader: RecordReader) -> list[int]:
        """Return the pids of this process and of `reader`, as the guest numbers them.

        An isolated mount numbers its clients by itself. A process finds its pid in the record of a marker
        that it has written.
        """
        if not self._is_isolated:
            return [os.getpid(), reader.pid]
        instance = self._tracefs / "instances" / self._session.name
        (instance / MARKER).write_text("own")
        reader.mark(instance / MARKER)
        pids = [int(pid) for pid in MARKED.findall((instance / "trace").read_text())]
        (instance / "trace").write_text("")
        return pids

    def _switch_on(self) -> None:
        """Enable all events of the session, and start the tracer of call graphs if there is one.

        Exclude this process and the reader of records from tracing.
        """
        session = self._session
        pids = self._own_pids
        (self._tracefs / "instances" / session.name / NOTRACE).write_text(" ".join(map(str, pids)))
        pids = list(dict.fromkeys([*pids, *self._exclude_from_others(*pids)]))
        lines = [f"{self._array}{NOTRACE} = {' '.join(map(str, pids))}"]
        if session.has_stacks:
            lines.append(f"{self._array}options/stacktrace = 1")
        self._apply([("trace", line, "") for line in lines])
        for event in self._events():
            name = event.removeprefix(f"{session.name}/").replace("/", ":")
            self._apply([("trace", self._setting(event, "enable", "1"), name)])
        if self._graph is not None:
            self._graph.start(pids)

    def _exclude_from_others(self, *pids: int) -> list[int]:
        """Exclude the processes `pids` of this session from tracing by all other sessions on the mount.

        Return all pids in the NOTRACE files of the other sessions, so that this session can exclude the same
        processes.
        """
        others: list[int] = []
        for name in self._files.directories(f"{self._files.tracefs()}instances"):
            if name == self._session.name or not NAME.fullmatch(name) or _is_dead(name):
                continue
            files = [f"instances/{name}/{NOTRACE}"]
            if name.endswith(SUFFIX):
                files += [NOTRACE, "set_ftrace_notrace_pid"]
            # The other session may end meanwhile.
            with suppress(OSError):
                for file in files:
                    with (self._tracefs / file).open("a") as opened:
                        opened.write(" ".join(map(str, pids)))
                others += map(int, (self._tracefs / files[0]).read_text().split())
        return others

    def _setting(self, event: str, file: str, value: str) -> str:
        return f"{self._array}events/{event}/{file} = {value}"

    def _named(self) -> list[tuple[str, str]]:
        """Return (event as group/name, name of the event in messages) for each event of the session."""
        prefix = f"{self._session.name}/"
        return [(event, event.removeprefix(prefix).replace("/", ":")) for event in self._session.events]

    def _apply(
        self, lines: Sequence[tuple[str, str, str]], probes: Mapping[str, AskedProbe] | None = None
    ) -> None:
        """Define probes on the mount, or write to its files, as `lines` say.

        An item of `lines` is a tuple: the line's name in messages, the line as in a definition file, and the
        user's own text. `probes`: the user's text -> the probe, for advice about a probe that the kernel
        refuses; None: there is no advice. Raises: CliError (a line failed).
        """
        from kprobefs.definitions.loader import Loader
        from kprobefs.definitions.syntax import Line

        loader = Loader(self._files)
        if failed := loader.apply([Line(place, 0, text, typed) for place, text, typed in lines]):
            # A hidden probe has the arguments of a probe that the user has given, and fails as that one does.
            for message in dict.fromkeys(failed):
                print(f"kprobefs: {message}", file=sys.stderr)
                for typed, probe in (probes or {}).items():
                    if message.split("\n")[1:2] == [f"    {escape_for_terminal(typed)}"]:
                        print(f"    {self._advice(probe, message)}", file=sys.stderr)
            raise CliError("the probes can't be defined, so the command was not run")

    def _stop(self, reader: RecordReader, *, has_failed: bool) -> None:
        for event in self._events():
            with suppress(OSError):
                (self._tracefs / self._array / "events" / event / "enable").write_text("0")
        was_on = self._graph is None or self._graph.stop()
        status = reader.finish()
        if has_failed:
            return
        from kprobefs.cli.ended_hint import ended_hint
        from kprobefs.common.terminal import print_message

        if ended := ended_hint(self._directory):
            print_message(ended)
        elif status > UNWRITTEN:
            name = escape_for_terminal(self._session.request.output or sys.stdout.name)
            why = os.strerror(status - UNWRITTEN)
            print_message(f"{name}: {why}: records are missing")
        elif status == NOTHING:
            print_message(f"nothing was recorded: {self._why_nothing(was_on=was_on)}")
        else:
            self._report()

    def _report(self) -> None:
        """If standard error is a terminal, print the name of the file that was written.

        If the output has durations of the virtual clock, also print a hint.
        """
        from kprobefs.common.terminal import print_message

        session = self._session
        if session.request.output is not None and sys.stderr.isatty():
            print_message(f"wrote {session.request.output}")
        if session.shows_durations:
            from kprobefs.cli.duration_hint import HINT, follows_virtual_clock

            if follows_virtual_clock(self._directory):
                print_message(HINT.format(where="in this trace"))

    def _why_nothing(self, *, was_on: bool) -> str:
        """Return a text with the reason why there are no records.

        `was_on`: whether recording was on at the command's end.
        """
        session = self._session
        if not was_on:
            return "tracing_on was 0"
        if any(session.filters().values()) and (hits := self._unfiltered({*self._own_pids})):
            return f"the filter accepted none of {counted(hits)}"
        prefix = f"{session.name}/"
        own = [event for event in self._history.read().events if event.event.startswith(prefix)]
        unarmed = next((event.unarmed for event in own if event.unarmed), "")
        if own and not any(event.armed for event in own):
            return UNARMED.format(reason=unarmed)
        if not own:
            probes = session.probes
            unarmed = switched_off(
                self._directory,
                kprobes=any(probe.definition for probe in probes),
                calls_alone=all(probe.definition and "+" not in probe.place for probe in probes),
            )
        if self._only_counts():
            from kprobefs.plan.planned_kernel import ONLY_COUNTED

            return ONLY_COUNTED
        _, missed = profile_counts(self._tracefs)
        for probe in session.probes:
            if probe.definition and (count := missed[probe.event.rpartition("/")[2]]):
                return why_missed(count, self._directory, at_return=probe.definition.startswith("r"))
        places = [probe.place or probe.event.replace("/", ":") for probe in session.probes]
        places += session.request.graph
        ended = EndedCommand(self._command, session.status or 0, self._directory, self._place)
        return why_no_hit(ended, places, unarmed)

    def _only_counts(self) -> bool:
        """Return True if a probe of the session was hit, but the kernel writes no records of such hits.

        This is so if a RISC-V kernel before v7.2 takes the hits with Linux's own kprobes.
        """
        daemon = running(self._directory)
        if daemon is None or (daemon.profile, daemon.arch) != (KERNEL_KPROBES, "riscv64"):
            return False
        from emulated_kernel.arch.analysis.probe_rules import ProbeRule
        from emulated_kernel.util.linux_rule import series_of

        release = (self._root / "machine" / "version").read_text().split()[2]
        if ProbeRule.RISCV_RECORDS in ProbeRule.of(series_of(release)):
            return False
        own = {event.rpartition("/")[2] for event in self._events()}
        hits, _ = profile_counts(self._tracefs)
        return any(hits[event] for event in own)

    def _unfiltered(self, own: set[int]) -> int:
        """Return the number of hits of the session's events in all processes except those with pids in `own`.

        Hits that the filter drops are included.
        """
        found = 0
        for event in self._session.events:
            with suppress(OSError):
                text = (self._tracefs / self._array / "events" / event / "hist").read_text()
                for pid, hits in re.findall(r"common_pid: +(\d+).*hitcount: +(\d+)", text):
                    found += 0 if int(pid) in own else int(hits)
        return found


class RecordReader:
    """A child process that writes the records of a trace array to an output as they arrive, from begin() on.

    The reader is not a thread, because this process must not have threads when it forks the command.
    """

    def __init__(self, array: Path, output: TraceOutput, *, at_end: bool) -> None:
        """Fork the child process, which waits for begin().

        `array`: directory of the trace array. `output` writes the records. `at_end`: read all records at
        finish(), and none before; False: read them as they arrive.

        A read takes time in the guest. So the durations in a trace are reproducible only if all reads come at
        its end.
        """
        self._output = output
        self._at_end = at_end
        commands, self._commands = os.pipe()
        self._ready, ready = os.pipe()
        output.output.flush()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._commands)
            os.close(self._ready)
            self._serve(array, commands, ready)
        os.close(commands)
        os.close(ready)

    def mark(self, marker: Path) -> None:
        """Make the child process write to the trace_marker file `marker`, and wait until it has done so.

        Call this before begin().
        """
        os.write(self._commands, f"{marker}\n".encode())
        os.read(self._ready, 1)

    def begin(self) -> None:
        """Make the child process open trace_pipe, and wait until it has done so or has failed."""
        with suppress(BrokenPipeError):
            os.write(self._commands, b"\n")
        os.read(self._ready, 1)

    def finish(self) -> int:
        """Make the child process write the remaining records and end. Return its exit status.

        The status is 0, NOTHING, or UNWRITTEN + errno.
        """
        os.close(self._commands)
        os.close(self._ready)
        _, status = os.waitpid(self.pid, 0)
        return os.waitstatus_to_exitcode(status)

    def _serve(self, array: Path, commands: int, ready: int) -> NoReturn:
        """Do the work of the child process: wait for begin(), write records until finish(), and exit.

        `array`: directory of the trace array. `commands`: pipe that begin() writes to and finish() closes.
        `ready`: pipe that the child closes when trace_pipe is open.
        """
        status = 0
        # Hazard: this is a forked copy of the caller. No exception may unwind into the caller's frames. There
        # may be one, because the mount may end earlier.
        try:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            command = os.read(commands, PATH_SIZE)
            if command[:1] == b"/":
                Path(os.fsdecode(command[:-1])).write_text("reader")
                os.write(ready, b"\n")
                command = os.read(commands, 1)
            if command:
                status = self._show_all(array, commands, ready)
        finally:
            os._exit(status)

    def _show_all(self, array: Path, commands: int, ready: int) -> int:
        try:
            self._output.prepare()
            pipe = os.open(array / "trace_pipe", os.O_RDONLY | os.O_NONBLOCK)
            os.close(ready)
            waiting = select.poll()
            for descriptor in (commands,) if self._at_end else (pipe, commands):
                waiting.register(descriptor, select.POLLIN)
            has_ended = False
            while not has_ended:
                has_ended = commands in dict(waiting.poll())
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
            if name.endswith(SUFFIX):
                reset(tracefs)
            with suppress(OSError):
                events = files.directories(f"{root}events/{name}") if name in groups else []
                _remove(tracefs, tracefs / "instances" / name, [f"{name}/{event}" for event in events])


def _is_dead(name: str) -> bool:
    """Return True if `name` is that of a session of this pid namespace whose process has ended."""
    found = NAME.fullmatch(name)
    if found is None or int(found["namespace"], 16) != os.stat(PID_NAMESPACE).st_ino:
        return False
    try:
        os.kill(int(found["pid"]), 0)
    except ProcessLookupError:
        return True
    # EPERM: the process belongs to another user and lives. Its start time may be hidden.
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
