"""`kprobefs run`: runs a command with a temporary mount, which ends with the command."""

from __future__ import annotations

import ctypes
import os
import re
import select
import shlex
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from emulated_kernel.guests.common.process_memory import ProcessMemory
from emulated_kernel.util.fast_dataclass import replace
from kprobefs.common import compile_ahead, mountpoints
from kprobefs.common.daemon_registry import known
from kprobefs.common.errors import CliError, ExitStatus
from kprobefs.daemon import daemon
from kprobefs.daemon.service import SIGNALS
from kprobefs.daemon.systemd_watchdog import PR_SET_PDEATHSIG
from kprobefs.mount_options import CLOCKS, Builder, MountOptions

END_TIMEOUT = 5.0
"""Maximum seconds that the daemon may take to end before it is killed.

If the daemon does not answer, it is also killed this number of seconds after a signal for the command.
"""
POLL_INTERVAL = 0.01
MAX_ENVIRONMENT = 4 << 20
"""Maximum number of bytes of a process's environment that are read.

Linux limits a process's environment and arguments together to 6 MiB.
"""

if TYPE_CHECKING:
    from kprobefs.cli.as_system import System
    from kprobefs.cli.nothing_hint import EndedCommand, Past
    from kprobefs.cli.trace import TraceSession

CLEANUP_TIMEOUT = 10.0
"""Maximum seconds that the processes left by a command may take to end after a signal.

Their clean-up needs the mount, for example to remove probes.
"""
READ_TIMEOUT = 1.0
"""Maximum seconds that a read of a process's environment may take, also on a busy host."""

# The C library is loaded here, because no library may be loaded between fork and exec.
_libc = ctypes.CDLL(None)


def run(
    options: MountOptions,
    build: Builder,
    command: Sequence[str],
    *,
    as_system: bool = False,
    real_root: bool = False,
    tracing: TraceSession | None = None,
) -> int:
    """Mount on a temporary directory, run `command` with the path of the mount in $KPROBEFS, and clean up.

    $KPROBEFS_OPTIONS has the options that select the same kernel again. `as_system`: show the mount at the
    system's own paths, too, and run the command in namespaces of its own. `real_root`: use no user namespace
    for the command. `tracing`: traces the command, and chooses its working directory; None: it is not traced.
    Return the command's exit status, or 128 + number if a signal ended the command.
    Raises: CliError (the mount, the probes or the start of the command failed).
    """
    if as_system:
        from kprobefs.cli import as_system as as_system_places

        as_system_places.enter_namespace(real_root=real_root)
    runner = _runner(command, tracing)
    runner.kernel_words = options.kernel_words
    try:
        with mounted(options, build, _import_hints) as base:
            from kprobefs.cli.nothing_hint import EndedCommand, History
            from kprobefs.definitions.tracefs_files import control_root

            directory = f"{base}/mnt"
            runner.end_by_signals()
            if as_system:
                runner.system = as_system_places.System(directory, base, real_root=real_root)
            with (
                closing(History(control_root(directory))) as history,
                closing(runner.system) if runner.system is not None else nullcontext(),
            ):
                status = runner.run(directory, tracing)
                past = history.read()
            if tracing is not None:
                from kprobefs.cli.scratch_copies import report_results

                report_results(base / "mnt" / "scratch")
            else:
                # Hints must not change the status, for example in a working directory that was removed, or if
                # the mount ends meanwhile.
                with suppress(OSError, CliError):
                    _print_hints(options, EndedCommand(command, status, directory, os.getcwd()), past)
            return status
    except CliError:
        # An interrupt from the terminal ends the start of the daemon too.
        if runner.pending:
            return 128 + runner.pending
        raise


def _import_hints() -> None:
    """Import the modules for the hints, which this process needs after the start of the daemon."""
    from kprobefs.cli import duration_hint, ended_hint, nothing_hint  # noqa: F401


def _print_hints(options: MountOptions, ended: EndedCommand, past: Past) -> None:
    """Print hints for the user on standard error.

    If the kernel has panicked or the mount is gone, the only hint says so. Otherwise, the hints are about
    probes without hits, hits without records, empty histograms, durations of the virtual clock, and refused
    requests. `past`: the history of the mount's events.
    """
    from kprobefs.cli.ended_hint import ended_hint

    found = ended_hint(ended.directory)
    hints = [found] if found else _hints(options, ended, past)
    if hints:
        from kprobefs.common.terminal import print_message

        for hint in hints:
            print_message(hint)


def _hints(options: MountOptions, ended: EndedCommand, past: Past) -> list[str]:
    """Disarm all probes, and return hints about refused requests, probes, histograms and durations."""
    from kprobefs.cli.nothing_hint import ENDED_EARLY, disarm, nothing_hints, present_events
    from kprobefs.cli.unmatched_hint import unmatched

    directory = ended.directory
    requests = past
    if past.is_partial:
        past = replace(present_events(directory), used=requests.used)
    disarm(directory)
    hints: list[str] = []
    if ended.status:
        from kprobefs.cli.refusal_hint import refusals

        hints += refusals(directory, requests)
    # A command that ends because of a refused request comes to no probe, which is no hint then.
    early = ENDED_EARLY.format(status=ended.status) if hints else None
    hints += [hint for hint in nothing_hints(ended, past) if early is None or early not in hint]
    hints += unmatched(past)
    if options.machine.clock == CLOCKS[0]:
        from kprobefs.cli.duration_hint import virtual_durations

        hints += virtual_durations(past)
    return hints


def check_host() -> None:
    """Check that the host allows a mount, before anything is created.

    Raises: CliError (/proc is missing, incomplete, or of another pid namespace).
    """
    try:
        mountpoints.check_proc()
    except CliError as failure:
        raise CliError(str(failure), ExitStatus.RUN_FAILED) from failure


@contextmanager
def mounted(
    options: MountOptions, build: Builder, meanwhile: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """Yield a temporary directory with a mount in its subdirectory `mnt`.

    After the block, end the daemon, and remove the mount and the directory.

    `build`: function that builds the served kernel. This process calls `meanwhile` while the daemon starts.
    Raises: CliError (the directory cannot be made, or the mount failed).
    """
    check_host()
    try:
        base = Path(os.path.realpath(tempfile.mkdtemp(prefix="kprobefs-")))
    except OSError as error:
        why = f"{error.strerror}; set TMPDIR to a writable directory, and see ulimit -f"
        raise CliError(f"temporary directory: {why}", ExitStatus.RUN_FAILED) from error
    session = os.getsid(0)

    def orphaned() -> None:
        if not base.exists():
            return
        signal_left(f"{base}/mnt", session, signal.SIGHUP)
        remove()

    def remove() -> None:
        if mountpoints.mounted_on(f"{base}/mnt") is None:
            shutil.rmtree(base, ignore_errors=True)

    try:
        # Other users may enter the directory: the modes of the mount itself restrict access.
        base.chmod(0o755)
        directory = base / "mnt"
        directory.mkdir()
        try:
            served = replace(options, directory=str(directory))
            child = daemon.start_as_child(served, build, orphaned, meanwhile)
        except CliError as failure:
            raise CliError(str(failure), ExitStatus.RUN_FAILED) from failure
        try:
            yield base
        finally:
            _end(child, str(directory))
    finally:
        remove()


def run_traced(directory: str, command: Sequence[str], tracing: TraceSession) -> int:
    """Run `command` with probes on an existing mount, and return the command's exit status.

    The status is 128 + number if a signal ended the command.
    Raises: CliError (a probe is refused, or the command cannot be started).
    """
    # This process starts no daemon.
    compile_ahead.end()
    return _runner(command, tracing).run(directory, tracing)


def _runner(command: Sequence[str], tracing: TraceSession | None) -> _Runner:
    """Return a runner of `command`. From now on, the runner handles the signals that end this process.

    `tracing`: the probes with which the command is traced, or None. If their records need standard output,
    the command's output goes to standard error.
    """
    runner = _Runner(command, 2 if tracing is not None and tracing.takes_output else None)
    runner.handle_signals()
    return runner


class _Runner:
    """Runs the command and forwards signals to it; a signal before the command's start is kept.

    While this process itself uses a temporary mount, signals have their default action. A request may take
    minutes in a slow guest, and Python would run no handler before the reply. When a signal ends this
    process, the daemon ends and the temporary directory is removed.
    """

    def __init__(self, command: Sequence[str], stdout: int | None) -> None:
        """Prepare to run `command`.

        `stdout`: descriptor of its standard output; None: the command inherits this process's.
        """
        self._command = list(command)
        self._process: subprocess.Popen[bytes] | None = None
        self._directory = ""
        """The mount that the command uses; "" before the command's start."""
        self.pending = 0
        """Number of a signal that arrived before the command was started; 0 if none did."""
        self._ignored = [number for number in SIGNALS if signal.getsignal(number) == signal.SIG_IGN]
        self._passed: signal.Signals | None = None
        """The latest signal that was forwarded to the command; None if none was."""
        self._received: signal.Signals | None = None
        """The latest signal that came while the command ran; None if none did."""
        self._stdout = stdout
        self.kernel_words: Sequence[str] | None = None
        """Options that select the mounted kernel; None if the mount existed before."""
        self.system: System | None = None
        """Object that shows the mount at the system's own paths; None without the option --as-system."""

    def handle_signals(self) -> None:
        """Install this object's handlers for the signals that end a program."""
        for number in SIGNALS:
            signal.signal(number, self.on_signal)

    def end_by_signals(self) -> None:
        """If the mount is temporary, restore the default actions of the signals that end a program.

        A signal that was forwarded to the command keeps its handler: timeout(1) sends its signal twice, and
        the records of the command are still to be shown.
        """
        if self.kernel_words is None or self.pending:
            return
        for number in SIGNALS:
            if number not in self._ignored and number != self._passed:
                signal.signal(number, signal.SIG_DFL)

    def run(self, directory: str, tracing: TraceSession | None) -> int:
        """Run the command; return its exit status as in a shell. Raises: CliError (it can't be started).

        `directory`: the mount. `tracing`: probes with which the command is traced, or None.
        """
        if tracing is None:
            return self._run(directory, None)
        if self.pending:
            return 128 + self.pending
        with tracing.attached(directory, self._command, is_shared=self.kernel_words is None) as place:
            tracing.status = self._run(directory, place)
            return tracing.status

    def _run(self, directory: str, place: str | None) -> int:
        self._directory = directory
        self.handle_signals()
        if self.pending:
            return 128 + self.pending
        try:
            added = self.system.environment if self.system else {}
            environment = {**os.environ, **added, "KPROBEFS": directory}
            environment.pop("KPROBEFS_OPTIONS", None)
            if self.kernel_words is not None:
                environment["KPROBEFS_OPTIONS"] = shlex.join(self.kernel_words)
            self._process = subprocess.Popen(
                self._command,
                env=environment,
                cwd=place,
                stdout=self._stdout,
                preexec_fn=self._prepare,  # noqa: PLW1509
            )
        except FileNotFoundError:
            raise self._not_found() from None
        except subprocess.SubprocessError:
            raise CliError("--as-system: namespaces: refused; see dmesg", ExitStatus.RUN_FAILED) from None
        except OSError as error:
            if _is_in_no_path(self._command[0]):
                raise self._not_found() from None
            raise CliError(f"{self._command[0]}: {error.strerror}", ExitStatus.NOT_EXECUTABLE) from None
        # A signal handler may have run inside Popen(), when the command was started but `_process` not set.
        if self.pending:
            self._pass_on(self.pending)
        status = self._process.wait()
        if self._passed:
            signal_left(directory, os.getsid(0), self._passed)
        self.end_by_signals()
        if self._received and (self._passed or status < 0) and self.kernel_words is not None:
            await_left(directory, os.getsid(0), self._received)
        return 128 - status if status < 0 else status

    def _not_found(self) -> CliError:
        return CliError(f"{shlex.quote(self._command[0])}: no such command", ExitStatus.NOT_FOUND)

    def _prepare(self) -> None:
        """Prepare the command's process between fork and exec.

        With `--as-system`, enter the namespaces. Then make the host send SIGHUP when the parent is killed.
        """
        if self.system is not None:
            self.system.enter()
        # Hazard: a process that changes its credentials loses the setting, so set it last.
        end_with_parent()

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal that ends a program.

        Forward it to the command. Before the command's start, store it in `pending`.
        """
        del frame
        if self._process is None:
            self.pending = number
        else:
            self._pass_on(number)

    def _pass_on(self, number: int) -> None:
        self._received = signal.Signals(number)
        # A terminal has sent its interrupt to the command, too.
        if self._process is not None and (number != signal.SIGINT or not in_foreground()):
            self._passed = signal.Signals(number)
            self._process.send_signal(number)
            if self.kernel_words is not None:
                # The main thread may wait for the daemon, without handling any signal.
                watch = threading.Timer(END_TIMEOUT, kill_hung_daemon, (self._directory,))
                watch.daemon = True
                watch.start()


def kill_hung_daemon(directory: str) -> None:
    """Kill the daemon of the mount on `directory` if it does not answer, so that requests to it end."""
    with suppress(CliError, OSError), known(directory) as daemon:
        if daemon is not None and mountpoints.condition(directory) is mountpoints.MountState.HUNG:
            from kprobefs.common.terminal import print_message

            daemon.send(signal.SIGKILL)
            print_message("the daemon did not answer, and was killed")


def signal_left(directory: str, session: int, number: signal.Signals) -> None:
    """Send a signal to the processes that a command has left behind; see _left().

    Stopped processes are continued, so that they can handle the signal.
    """
    for _pid, descriptor in _left(directory, session):
        with suppress(OSError):
            signal.pidfd_send_signal(descriptor, number)
            signal.pidfd_send_signal(descriptor, signal.SIGCONT)


def await_left(directory: str, session: int, number: signal.Signals) -> None:
    """Wait until the processes that a command has left behind have ended, but at most CLEANUP_TIMEOUT.

    Do not wait for processes that ignore the signal `number`, because they are meant to survive the signal.
    """
    deadline = time.monotonic() + CLEANUP_TIMEOUT
    for pid, descriptor in _left(directory, session):
        if not _ignores(pid, number):
            ended = select.poll()
            ended.register(descriptor, select.POLLIN)
            ended.poll(max(0, deadline - time.monotonic()) * 1000)


def _left(directory: str, session: int) -> Iterator[tuple[int, int]]:
    """Yield (pid, pidfd) of each process that a command has left behind.

    These are the processes of the session with the id `session` whose $KPROBEFS is `directory`. A process
    that made its own session is not among them, because it is meant to outlive the command. If the
    environment of a process cannot be read in time, the process is not among them. A pidfd is closed before
    the next item.
    """
    mark = os.fsencode(f"KPROBEFS={directory}")
    with closing(ProcessMemory(READ_TIMEOUT)) as memory:
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc"))):
            with suppress(OSError):
                if pid == os.getpid() or os.getsid(pid) != session:
                    continue
                descriptor = os.pidfd_open(pid)
                try:
                    # While the pidfd is open, the pid cannot belong to another process.
                    environment = memory.read(f"/proc/{pid}/environ", [(0, MAX_ENVIRONMENT)])
                    if environment is not None and mark in environment[0].split(b"\0"):
                        yield pid, descriptor
                finally:
                    os.close(descriptor)


def _ignores(pid: int, number: signal.Signals) -> bool:
    """Return True if a process ignores a signal, or has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return True
    ignored = re.search(r"^SigIgn:\t([0-9a-f]+)$", status, re.MULTILINE)
    return ignored is not None and bool(int(ignored[1], 16) >> number - 1 & 1)


def _is_in_no_path(name: str) -> bool:
    """Return True if a shell would find no file for the command `name` in the directories of PATH.

    A subdirectory called `name` does not count as a file. Return False if `name` contains a slash.
    """
    return "/" not in name and not any(
        os.path.isfile(os.path.join(place, name)) for place in os.get_exec_path()
    )


def end_with_parent() -> None:
    """Make the host send SIGHUP to this process when its parent is killed; called between fork and exec."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGHUP)


def in_foreground() -> bool:
    """Return True if the terminal sends its signals to this process's group.

    Return False if it does not, or if there is no terminal.
    """
    try:
        terminal = os.open("/dev/tty", os.O_RDONLY | os.O_NOCTTY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.tcgetpgrp(terminal) == os.getpgrp()
    finally:
        os.close(terminal)


def _end(child: int, directory: str) -> None:
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)
    deadline = time.monotonic() + END_TIMEOUT
    while os.waitpid(child, os.WNOHANG) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(POLL_INTERVAL)
    if mountpoints.mounted_on(directory) is not None:
        mountpoints.detach(directory)
