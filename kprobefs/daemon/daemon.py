"""Start of a daemon, in the foreground, in the background, or as a child of its caller."""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from select import POLLERR, poll
from typing import NoReturn, TextIO

from kprobefs.common import mountpoints
from kprobefs.common.daemon_registry import log_path, sweep
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal, resource_hint
from kprobefs.daemon.log_file import check_log, last_line, open_log
from kprobefs.daemon.service import SIGNALS, Service
from kprobefs.daemon.systemd_watchdog import PR_SET_PDEATHSIG
from kprobefs.mount_options import Builder, MountOptions

log = logging.getLogger("kprobefs")

READY = b"\0"


def run_in_foreground(options: MountOptions, build: Builder, log_file: Path | None) -> None:
    """Serve in this process, with what mounts begin with. Raises: CliError."""
    if log_file is None:
        _start_logging(logging.INFO, sys.stderr)
    else:
        descriptor = open_log(str(log_file), options.directory, anew=False)
        _start_logging(logging.INFO, os.fdopen(descriptor, "a"))
    Service(options, build, applies_definitions=True).run(lambda: None, lambda: None)


def start_in_background(options: MountOptions, build: Builder, log_file: Path | None = None) -> None:
    """Start a daemon, and return when its mount answers. Raises: CliError (with the daemon's reason)."""
    start = DaemonStart(options, build, log_file)
    child = os.fork()
    if child == 0:
        os.setsid()
        if os.fork() == 0:
            start.serve()
        os._exit(0)
    os.waitpid(child, 0)
    start.await_ready()


def start_as_child(options: MountOptions, build: Builder, on_orphaned: Callable[[], None]) -> int:
    """Start a daemon that ends with its parent; its pid, when its mount answers. Raises: CliError.

    `on_orphaned` is called at its end, where the parent is gone then.
    """
    start = DaemonStart(options, build, None)
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        # A session of its own: an interrupt from the terminal is for the command. Until the service has its
        # handlers the caller's would swallow the signal of the parent's death.
        os.setsid()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(ExitStatus.FAILURE)
        start.serve(lambda: None if os.getppid() == parent else on_orphaned())
    try:
        start.await_ready()
    except BaseException:
        with suppress(ProcessLookupError):
            os.kill(child, signal.SIGTERM)
        os.waitpid(child, 0)
        raise
    return child


class DaemonStart:
    """A daemon's start, seen from both sides of the fork: it ends in a mount, or in nothing and a reason."""

    def __init__(self, options: MountOptions, build: Builder, log_file: Path | None) -> None:
        """Raises: CliError (the log can't be written)."""
        self._options = options
        self._build = build
        self._is_own_log = log_file is None
        self._log_file = log_file or log_path(options.directory)
        check_log(str(self._log_file), options.directory)
        self._reader, self._writer = os.pipe()
        self._is_told = threading.Lock()

    def await_ready(self) -> None:
        """For who started it. Raises: CliError (with the daemon's reason)."""
        os.close(self._writer)
        with os.fdopen(self._reader, "rb") as pipe:
            answer = pipe.read()
        if not answer:
            # It may have been killed, by itself too.
            sweep()
            raise CliError(self._bug("it ended without a word"))
        if answer != READY:
            raise CliError(answer[1:].decode(errors="surrogateescape"), ExitStatus(answer[0]))

    def serve(self, at_end: Callable[[], None] = lambda: None) -> NoReturn:
        """Serve, in the daemon, and end the process."""
        status = ExitStatus.FAILURE
        # This is a forked copy of the caller: nothing may get back into its frames.
        try:
            status = self._serve_or_report()
        finally:
            with suppress(BaseException):
                at_end()
            if status == ExitStatus.OK and not os.fstat(2).st_size:
                self._remove_own_log()
            logging.shutdown()
            os._exit(status)

    def _serve_or_report(self) -> ExitStatus:
        try:
            os.close(self._reader)
            self._leave_terminal()
            _start_logging(logging.WARNING if self._is_own_log else logging.INFO, sys.stderr)
            given = _given_descriptors()
            service = Service(self._options, self._build, applies_definitions=False)
            service.run(self._watch_starter, lambda: self._become_ready(given))
        except CliError as failure:
            self._report(failure)
        except BaseException as error:
            self._report_unexpected(error)
        else:
            return ExitStatus.OK
        return ExitStatus.FAILURE

    def _report(self, failure: CliError) -> None:
        """Log the failure. If whoever started the daemon reads it, no log needs to stay."""
        why = last_line(sys.stderr.fileno()) if failure.is_explained else ""
        message = f"{failure}: {why}" if why else str(failure)
        log.error("%s", escape_for_terminal(message))
        if self._tell_reason(message, failure.status):
            self._remove_own_log()

    def _report_unexpected(self, error: BaseException) -> None:
        lacking = resource_hint(error)
        if lacking and self._tell_reason(lacking, ExitStatus.FAILURE):
            self._remove_own_log()
        else:
            log.exception("the daemon failed")
            self._tell_reason(self._bug(f"{type(error).__name__}: {error}"), ExitStatus.FAILURE)

    def _remove_own_log(self) -> None:
        if self._is_own_log:
            self._log_file.unlink(missing_ok=True)

    def _become_ready(self, given: Sequence[int]) -> None:
        # A lock or a pipe that its starter was given would be held as long as the mount. Only now: the
        # kernel's file may have been named by such a descriptor.
        for descriptor in given:
            os.close(descriptor)
        self._tell(READY)

    def _bug(self, what: str) -> str:
        return f"the daemon failed at its start: {what}: see {self._log_file}"

    def _tell_reason(self, message: str, status: ExitStatus) -> bool:
        return self._tell(bytes((status,)) + message.encode(errors="surrogateescape"))

    def _tell(self, message: bytes) -> bool:
        """Tell who started the daemon; False where it was told before."""
        if not self._is_told.acquire(blocking=False):
            return False
        # Who started it may be gone.
        with suppress(BrokenPipeError):
            os.write(self._writer, message)
        os.close(self._writer)
        return True

    def _watch_starter(self) -> None:
        """From now on the daemon ends when who started it goes before the mount stands."""

        def watch() -> None:
            waiting = poll()
            waiting.register(self._writer, 0)
            # What is shorter than this needs no watch; and the descriptor is closed with the answer.
            while not self._is_told.locked():
                if any(event & POLLERR for _, event in waiting.poll(100)) and self._is_told.acquire(False):
                    log.error("who started the daemon went before the mount was there")
                    if mountpoints.mounted_on(self._options.directory):
                        with suppress(CliError):
                            mountpoints.detach(self._options.directory)
                    os._exit(ExitStatus.FAILURE)

        threading.Thread(target=watch, name="starter", daemon=True).start()

    def _leave_terminal(self) -> None:
        os.chdir("/")
        try:
            null = os.open(os.devnull, os.O_RDONLY)
        except OSError as error:
            raise CliError(f"{os.devnull}: {error.strerror}") from error
        output = open_log(str(self._log_file), self._options.directory, anew=self._is_own_log)
        for target, source in ((0, null), (1, output), (2, output)):
            os.dup2(source, target)
        os.close(null)
        os.close(output)


def _given_descriptors() -> list[int]:
    """Those that came by execve(2), but standard ones: Python's own don't go that way."""
    found = []
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        # That of the listing itself is gone.
        with suppress(OSError):
            if descriptor > 2 and os.get_inheritable(descriptor):
                found.append(descriptor)
    return found


def _start_logging(level: int, stream: TextIO) -> None:
    form = "%(asctime)s %(name)s[%(process)d]: %(levelname)s: %(message)s"
    if "JOURNAL_STREAM" in os.environ:
        form = "%(levelname)s: %(message)s"
    logging.basicConfig(level=level, format=form, stream=stream)
