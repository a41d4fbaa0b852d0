"""Starts a daemon: in the foreground, in the background, or as a child of the calling process."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from select import POLLERR, poll
from typing import NoReturn

from kprobefs.common import compile_ahead, mountpoints
from kprobefs.common.daemon_registry import forget, log_path, sweep
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal, fork, resource_hint
from kprobefs.daemon.log_file import check_log, last_line, open_log
from kprobefs.daemon.log_writer import LogWriter, flush_log
from kprobefs.daemon.service import SIGNALS, Service
from kprobefs.daemon.systemd_watchdog import PR_SET_PDEATHSIG
from kprobefs.daemon.unmount_watcher import Orphaned
from kprobefs.mount_options import Builder, MountOptions

log = logging.getLogger("kprobefs")

STANDARD_ERROR = 2
"""Descriptor of the standard error. A program that uses main() as a function may have replaced sys.stderr."""
READY = b"\0"
"""Message from the daemon to the process that started it: the mount answers requests."""


def run_in_foreground(options: MountOptions, build: Builder, log_file: Path | None) -> None:
    """Serve the mount in this process until the mount ends, and apply the *.probes files.

    `build` builds the served kernel. `log_file`: path of the log; None: log to the standard error. Raises:
    CliError (the log or the mount fails).
    """
    if log_file is None:
        _start_logging(logging.INFO, STANDARD_ERROR)
    else:
        descriptor = open_log(str(log_file), options.directory, truncates=False)
        _start_logging(logging.INFO, descriptor)
    Service(options, build, applies_definitions=True).run()


def start_in_background(options: MountOptions, build: Builder, log_file: Path | None = None) -> None:
    """Start a daemon, and return when the daemon's mount answers requests.

    `build` builds the served kernel. `log_file`: path of the log; None: a file in the runtime directory.
    Raises: CliError (with the daemon's message).
    """
    start = DaemonStart(options, build, log_file)
    child = fork()
    if child == 0:
        _forget_handlers()
        # The leader of a process group cannot make a session, but the child of another process can.
        if os.fork() == 0:
            start.serve()
        os._exit(0)
    os.waitpid(child, 0)
    start.await_ready()


def start_as_child(
    options: MountOptions,
    build: Builder,
    on_orphaned: Callable[[], None],
    meanwhile: Callable[[], None] = lambda: None,
) -> int:
    """Start a daemon that ends with its parent; return the daemon's pid when the mount answers.

    `build` builds the served kernel. The calling process calls `meanwhile` while the daemon starts. When the
    daemon and its parent have ended, in any order and by any signal, a third process (that of UnmountWatcher)
    calls `on_orphaned`. Raises: CliError (with the daemon's message).
    """
    start = DaemonStart(options, build, None)
    parent = os.getpid()
    ended = os.pidfd_open(parent)
    child = fork()
    if child == 0:
        _forget_handlers()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(ExitStatus.FAILURE)
        start.serve(Orphaned(ended, on_orphaned))
    os.close(ended)
    try:
        meanwhile()
        start.await_ready()
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise
    return child


def _forget_handlers() -> None:
    """Restore the default actions of SIGNALS in the daemon, until Service installs handlers.

    The handlers of the process that forked the daemon would intercept the signal that reports the parent's
    death.
    """
    for number in SIGNALS:
        signal.signal(number, signal.SIG_DFL)


class DaemonStart:
    """The start of a daemon, which reports success or a failure to the starting process by a pipe.

    The starting process calls await_ready(), and its child, the daemon, calls serve().
    """

    def __init__(self, options: MountOptions, build: Builder, log_file: Path | None) -> None:
        """Check /proc and the log, and open the pipe, before the fork.

        `build` builds the served kernel. `log_file`: path of the log; None: a file in the runtime directory.
        Raises: CliError (see check_proc() and check_log()).
        """
        self._options = options
        self._build = build
        mountpoints.check_proc()
        self._is_own_log = log_file is None
        self._log_file = log_file or log_path(options.directory)
        check_log(str(self._log_file), options.directory, is_explicit=not self._is_own_log)
        self._reader, self._writer = os.pipe()
        self._is_notified = threading.Lock()
        self._is_logging = False
        """Whether this process, the daemon, has opened the log."""

    def await_ready(self) -> None:
        """Wait until the mount answers; the starting process calls this method.

        Raises: CliError (with the daemon's message).
        """
        os.close(self._writer)
        with os.fdopen(self._reader, "rb") as pipe:
            # The pipe's end comes later, because a thread of the daemon still polls the closed descriptor.
            answer = pipe.read(len(READY))
            if answer != READY:
                answer += pipe.read()
        compile_ahead.end()
        if not answer:
            # A daemon that was killed leaves its mount and its record.
            sweep()
            raise CliError(self._bug("it ended without giving a reason"))
        if answer != READY:
            raise CliError(answer[1:].decode(errors="surrogateescape"), ExitStatus(answer[0]))

    def serve(self, orphaned: Orphaned | None = None) -> NoReturn:
        """Serve the mount, and end the process; the daemon calls this method.

        `orphaned`: clean-up that UnmountWatcher's process does when the daemon and its parent have ended, or
        None.
        """
        status = ExitStatus.FAILURE
        # Hazard: this is a forked copy of the caller. No exception may unwind into the caller's frames.
        try:
            status = self._serve_or_report(orphaned)
        finally:
            logging.shutdown()
            os._exit(status)

    def _serve_or_report(self, orphaned: Orphaned | None) -> ExitStatus:
        try:
            os.close(self._reader)
            os.chdir("/")
            given = _inherited_descriptors()
            service = Service(self._options, self._build, applies_definitions=False)
            on_ready = partial(self._become_ready, given)
            service.run(self._begin_log, self._watch_starter, on_ready, orphaned)
        except CliError as failure:
            self._report(failure)
        except BaseException as error:
            self._report_unexpected(error)
        else:
            return ExitStatus.OK
        return ExitStatus.FAILURE

    def _report(self, failure: CliError) -> None:
        """Log a failure of the daemon, and send its message to the starting process.

        Before the message is sent, remove the log, unless the user has named the log file.
        """
        why = last_line(STANDARD_ERROR) if failure.is_explained and self._is_logging else ""
        message = f"{failure}: {why}" if why else str(failure)
        if failure.is_explained:
            message += mountpoints.fusermount_advice()
        if self._is_logging:
            log.error("%s", escape_for_terminal(message))
        self._notify_failure(message, failure.status, keeps_log=False)

    def _report_unexpected(self, error: BaseException) -> None:
        lacking = resource_hint(error)
        if not lacking or not self._notify_failure(lacking, ExitStatus.FAILURE, keeps_log=False):
            log.exception("the daemon failed")
            self._notify_failure(self._bug(f"{type(error).__name__}: {error}"), ExitStatus.FAILURE)

    def _become_ready(self, given: Sequence[int]) -> None:
        # In its own session the daemon gets no signals from the terminal. Hazard: until the mount is there,
        # autofs lets only the caller's process group pass to the directory.
        os.setsid()
        # A lock or a pipe inherited from the starting process would be held as long as the mount lives.
        # They are closed only now because the kernel's file may be named as /dev/fd/N.
        for descriptor in given:
            os.close(descriptor)
        self._notify_starter(READY)

    def _bug(self, reason: str) -> str:
        return f"the daemon failed at its start: {reason}: see {self._log_file}"

    def _notify_failure(self, message: str, status: ExitStatus, *, keeps_log: bool = True) -> bool:
        # The message may name the log, which is read when this process has answered.
        flush_log()
        return self._notify_starter(
            bytes((status,)) + message.encode(errors="surrogateescape"), keeps_log=keeps_log
        )

    def _notify_starter(self, message: bytes, *, keeps_log: bool = True) -> bool:
        """Send a message to the starting process, unless another message was sent before.

        `message`: READY, or an exit status in one byte and the text of an error. `keeps_log`: if False,
        remove the daemon's own log before the message is sent.

        Return False if another message was sent before, else True, even if the starting process is dead.
        """
        if not self._is_notified.acquire(blocking=False):
            return False
        # When the starting process has the message, its user may already look at the directory.
        if not keeps_log and self._is_own_log:
            # If memory is lacking, the message is still sent.
            with suppress(Exception):
                forget(self._options.directory, keeps_log=False)
        # The starting process may be dead.
        with suppress(BrokenPipeError):
            os.write(self._writer, message)
        os.close(self._writer)
        return True

    def _watch_starter(self) -> None:
        """Start a thread that ends the daemon if the starting process dies before the mount answers."""

        def watch() -> None:
            waiting = poll()
            waiting.register(self._writer, 0)
            # The timeout is needed because _notify_starter() closes the descriptor that is polled here.
            while not self._is_notified.locked():
                if any(event & POLLERR for _, event in waiting.poll(100)) and self._is_notified.acquire(
                    False
                ):
                    log.error("the process that started the daemon died before the mount answered")
                    if mountpoints.mounted_on(self._options.directory):
                        with suppress(CliError):
                            mountpoints.detach(self._options.directory)
                    os._exit(ExitStatus.FAILURE)

        threading.Thread(target=watch, name="starter", daemon=True).start()

    def _begin_log(self) -> None:
        """Open the log, and make it the standard output and error, so that the daemon leaves the terminal.

        The daemon must be registered, because the log may be that of another daemon before.
        """
        try:
            null = os.open(os.devnull, os.O_RDONLY)
        except OSError as error:
            raise CliError(f"{os.devnull}: {error.strerror}") from error
        output = open_log(
            str(self._log_file),
            self._options.directory,
            truncates=self._is_own_log,
            is_explicit=not self._is_own_log,
        )
        for target, source in ((0, null), (1, output), (2, output)):
            os.dup2(source, target)
        os.close(null)
        os.close(output)
        _start_logging(logging.WARNING if self._is_own_log else logging.INFO, STANDARD_ERROR)
        self._is_logging = True


def _inherited_descriptors() -> list[int]:
    """Return the descriptors that this process has inherited through execve(2), except standard streams.

    Python opens its own descriptors with FD_CLOEXEC.
    """
    found = []
    for name in os.listdir("/proc/self/fd"):
        descriptor = int(name)
        # The descriptor that os.listdir() used is closed again.
        with suppress(OSError):
            if descriptor > 2 and os.get_inheritable(descriptor):
                found.append(descriptor)
    return found


def _start_logging(level: int, descriptor: int) -> None:
    form = "%(asctime)s %(name)s[%(process)d]: %(levelname)s: %(message)s"
    if "JOURNAL_STREAM" in os.environ:
        form = "%(levelname)s: %(message)s"
    logging.basicConfig(level=level, format=form, handlers=[LogWriter(descriptor)])
