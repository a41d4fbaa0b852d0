"""The function graph tracer for `kprobefs trace --graph`.

A mount has one such tracer, in its top-level trace array. A session uses the tracer only if neither the
tracer nor the array is in use, and restores the files of both afterwards.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from errno import EBUSY, EINVAL
from pathlib import Path

from kprobefs.common.errors import CliError, escape_for_terminal

SUFFIX = "_graph"
"""End of the name of a session's instance if the session uses the mount's function graph tracer."""
TRACER = "function_graph"
INIT = 1
"""Pid of the guest task that makes kprobefs's own calls in a distribution's kernel; it is not traced."""
BUFFERED = re.compile(r"^(?:entries|overrun): ([1-9]\d*)$", re.MULTILINE)
"""Pattern for a line of a buffer's `stats` that shows that the buffer has, or had, records."""
NO_PID = "no pid"
"""Line that set_ftrace_pid or set_ftrace_notrace_pid shows if its list of pids is empty."""


class GraphTracer:
    """The function graph tracer of a mount, from prepare() to restore()."""

    def __init__(self, tracefs: Path) -> None:
        self._tracefs = tracefs
        self._undo = ExitStack()
        self._excluded = ""
        """Pids that set_ftrace_notrace_pid contained before the session, separated by blanks."""

    def prepare(
        self, functions: Sequence[str], options: Sequence[str], nearest: Callable[[str], str]
    ) -> None:
        """Select the functions whose calls are recorded, and set the tracer's options called `options` to 1.

        `nearest` returns advice about the name of a function that does not exist, or "" if there is none.
        Raises: CliError (there is no tracer, it is in use, or the function cannot be traced).
        """
        if TRACER not in self._read("available_tracers").split():
            profiles = "linux-6.1 or riscv-optprobes-2023-ftrace"
            why = f"no function graph; use a --profile with ftrace, such as {profiles}, or --kprobes kernel"
            raise CliError(f"--graph {escape_for_terminal(functions[0])}: {why}")
        self._check_free()
        for name in ("tracing_on", *(f"options/{name}" for name in options)):
            self._undo.callback(self._set, name, self._read(name))
        self._excluded = self._read("set_ftrace_notrace_pid").replace(NO_PID, "")
        self._undo.callback(self._set, "set_ftrace_notrace_pid", self._excluded)
        events = self._read("set_event_notrace_pid").replace(NO_PID, "")
        self._undo.callback(self._set, "set_event_notrace_pid", events)
        self._undo.callback(self._set, "set_graph_function", "")
        for number, function in enumerate(functions):
            try:
                self._write("set_graph_function", f"{function}\n", "a" if number else "w")
            except OSError as error:
                # Linux: EINVAL if no function has the name or matches the pattern.
                why = str(error.strerror)
                if error.errno == EINVAL:
                    remedy = nearest(function) or "see available_filter_functions"
                    why = f"no such function can be traced; {remedy}"
                raise CliError(f"--graph {escape_for_terminal(function)}: {why}") from None
        for name in options:
            self._write(f"options/{name}", "1")

    def start(self, excluded: Sequence[int]) -> None:
        """Start the tracer, but do not trace the tasks with the pids `excluded`.

        Raises: CliError (trace_pipe of the top-level trace array is open).
        """
        # Hazard: in Linux a task that enters the function while nothing is recorded is traced later, outside
        # of the function. So recording is on, and the tasks are excluded, before the tracer is selected.
        self._write("set_ftrace_notrace_pid", " ".join(map(str, (self._excluded, INIT, *excluded))))
        self._write("tracing_on", "1")
        self._undo.callback(self._set, "current_tracer", "nop")
        try:
            self._write("current_tracer", TRACER)
        except OSError as error:
            if error.errno != EBUSY:
                raise
            raise _in_use("its trace_pipe is open") from None

    def stop(self) -> bool:
        """Stop recording. Return False if recording was off already, else True.

        If the mount does not answer any more, do nothing and return True.
        """
        was_on = True
        with suppress(OSError):
            was_on = self._read("tracing_on") != "0"
        self._set("tracing_on", "0")
        return was_on

    def restore(self) -> None:
        """Restore the contents of the mount's files that this object has changed.

        Errors are ignored, because the mount may have ended. trace_pipe must be closed.
        """
        self._undo.close()

    def _check_free(self) -> None:
        """Check that the tracer and the top-level trace array are unused. Raises: CliError (one is used)."""
        if (tracer := self._read("current_tracer")) != "nop":
            raise _in_use(f"current_tracer is {tracer}")
        for name in ("set_graph_function", "set_ftrace_pid"):
            selected = self._read(name)
            if not selected.startswith("#") and selected != NO_PID:
                raise _in_use(f"{name} has a selection")
        if events := self._read("set_event").split():
            raise _in_use(f"{events[0]} is enabled")
        if any(BUFFERED.search(file.read_text()) for file in self._tracefs.glob("per_cpu/cpu*/stats")):
            raise _in_use("its trace has records")

    def _read(self, name: str) -> str:
        return (self._tracefs / name).read_text().strip()

    def _write(self, name: str, text: str, mode: str = "w") -> None:
        with (self._tracefs / name).open(mode) as file:
            file.write(text)

    def _set(self, name: str, text: str) -> None:
        with suppress(OSError):
            self._write(name, text)


def reset(tracefs: Path) -> None:
    """Stop the tracer that a killed session has left running, and clear its selections and its records."""
    for name, text in (
        ("current_tracer", "nop"),
        ("set_graph_function", ""),
        ("set_ftrace_notrace_pid", ""),
        ("trace", ""),
    ):
        with suppress(OSError):
            (tracefs / name).write_text(text)


def _in_use(why: str) -> CliError:
    remedy = "the tracer and the top-level trace have one user at a time: clear them, or leave -m out"
    return CliError(f"trace --graph: {escape_for_terminal(why)}; {remedy}")
