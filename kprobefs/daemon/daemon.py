"""The daemon: builds the kernel, serves the mount until a signal or umount, cleans up."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from select import POLLERR, POLLIN, poll
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, TextIO

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.threads import start_thread
from kprobefs import __version__
from kprobefs.common import mountpoints
from kprobefs.common.daemon_registry import Daemon, Registration, log_path, sweep
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal, resource_hint
from kprobefs.daemon.apply_process import ApplyProcess
from kprobefs.daemon.log_file import check_log, last_line, open_log
from kprobefs.daemon.mount_namespace import NamespaceMembers
from kprobefs.daemon.sd_notify import sd_notify
from kprobefs.daemon.systemd_watchdog import PR_SET_PDEATHSIG, ServiceWatchdog, watchdog_interval
from kprobefs.definitions import dropins
from kprobefs.fuse.memory_reserve import share_heap
from kprobefs.mount_options import Builder, MountOptions

if TYPE_CHECKING:
    from kprobefs.fuse.operations import Server

log = logging.getLogger("kprobefs")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
CLOSE_TIMEOUT = 1.0
"""Seconds that who waits in a read has to be sent away before the mount is taken off."""
END_TIMEOUT = 2.0
"""Seconds that the session may take to end once it is unmounted; the process ends anyhow."""
SWITCH_INTERVAL = 0.0002
"""Seconds. Handlers of the emulator compete with requests for the interpreter; see sys.setswitchinterval."""
FULL_COLLECTIONS = 50
"""Collections of younger garbage for each full one, which takes longer than registering a thousand probes."""
APPLY_TIMEOUT = 30.0
"""Seconds that a start waits for the definitions."""
READY = b"\0"


class Service:
    """One mount, from building its kernel to the end. Needs the main thread, for signals."""

    def __init__(self, options: MountOptions, build: Builder, *, applies_definitions: bool) -> None:
        """`applies_definitions`: apply those that mounts begin with; otherwise the starting process does."""
        self._options = options
        self._build = build
        self._applies_definitions = applies_definitions
        self._wake = Wake()
        self._companions = NamespaceMembers()
        self._mounted = False
        self._failure: CliError | None = None

    def run(self, on_prepared: Callable[[], None], on_ready: Callable[[], object]) -> None:
        """Serve until SIGTERM, SIGINT, SIGHUP or umount.

        `on_prepared` is called while there are no threads yet, `on_ready` once the mount answers.
        Raises: CliError.
        """
        # Before libfuse is loaded: it takes signals that still have their default action.
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        registration = Registration(self._describe())
        heartbeat = None
        try:
            with mountpoints.prepared(
                self._options.directory,
                make=self._options.make_directory,
                allow_other=self._options.allow_other,
            ):
                interval = watchdog_interval()
                if interval is not None:
                    heartbeat = ServiceWatchdog(self._options.directory, interval)
                    self._companions.add(heartbeat.pid)
                on_prepared()
                self._serve(heartbeat, on_ready)
        finally:
            if heartbeat is not None:
                heartbeat.end()
            registration.close()

    def _serve(self, heartbeat: ServiceWatchdog | None, on_ready: Callable[[], object]) -> None:
        from kprobefs.fuse.operations import FuseOptions, Server

        share_heap()
        # What the kernel is made of stays; it would be looked at by each full collection.
        gc.disable()
        served = self._build(self._options)
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTIONS)
        gc.enable()
        fuse = FuseOptions(
            self._options.source,
            allow_other=self._options.allow_other,
            is_ordered=self._options.isolate,
            flags=self._options.flags,
        )
        server = Server(served, fuse)
        if self._wake.is_set():
            return
        sys.setswitchinterval(SWITCH_INTERVAL)
        ready = threading.Event()
        session = threading.Thread(target=self._session, args=(server, ready), name="fuse", daemon=True)
        session.start()
        ready.wait()
        if self._mounted:
            directory = escape_for_terminal(self._options.directory)
            on_ready()
            log.info("serving %s", directory)
            applying = ApplyProcess(self._options.directory) if self._has_definitions() else None
            self._wait(heartbeat, applying)
            sd_notify("STOPPING=1")
            if applying is not None:
                applying.end()
        server.stop()
        # It waits for the request that has the kernel, which may be a long one.
        closing: threading.Thread | None = None
        with suppress(KernelError):
            closing = start_thread("close", served.close)
            closing.join(CLOSE_TIMEOUT)
        self._end(session)
        # The host had no thread for it; behind the session's end there is nothing to wait for.
        if closing is None and not session.is_alive():
            served.close()
        if self._failure is not None:
            raise self._failure

    def _has_definitions(self) -> bool:
        return self._applies_definitions and bool(dropins.files())

    def _wait(self, heartbeat: ServiceWatchdog | None, applying: ApplyProcess | None) -> None:
        """Until it is time to end; meanwhile the service manager hears what the mount answers.

        The start is over when the definitions are applied, or have taken too long; they go on then.
        """
        directory = escape_for_terminal(self._options.directory)
        condition = "serving"
        deadline = time.monotonic() + APPLY_TIMEOUT
        remark = "" if applying is None else "applying definitions"
        told = ""
        is_ready = False
        if heartbeat is not None:
            heartbeat.start()
        while True:
            status = f"{condition} {directory}{remark and ': '}{remark}"
            if not is_ready and (applying is None or time.monotonic() > deadline):
                is_ready = True
                sd_notify("READY=1", f"STATUS={status}")
            elif status != told:
                sd_notify(f"STATUS={status}")
            told = status
            timeout = self._companions.interval if is_ready else max(0, deadline - time.monotonic())
            sources = [source.descriptor for source in (heartbeat, applying) if source is not None]
            found = self._wake.wait(sources, timeout)
            if self._wake.is_set():
                return
            if not found and is_ready and self._companions.have_gone():
                log.info("nobody else is left in the mount namespace")
                return
            if applying is not None and applying.descriptor in found:
                ended = applying.read()
                if ended is not None:
                    remark = ended
                    applying = None
            if heartbeat is not None and heartbeat.descriptor in found:
                answer = heartbeat.answer()
                if not answer:
                    log.error("nothing asks the mount for its state any more")
                    heartbeat = None
                    continue
                sd_notify("WATCHDOG=1")
                condition = answer

    def _session(self, server: Server, ready: threading.Event) -> None:
        def mounted() -> None:
            self._mounted = True
            ready.set()

        try:
            server.serve(self._options.directory, mounted)
        except CliError as failure:
            if self._wake.is_set():
                # Unmounted under its threads, libfuse's loop may end with an error of its own.
                log.info("the session ended: %s", failure)
            else:
                self._failure = failure
        except Exception as error:
            log.exception("the FUSE session failed")
            self._failure = CliError(f"{self._options.directory}: {error}: this is a bug")
        finally:
            self._wake.set()
            ready.set()

    def _end(self, session: threading.Thread) -> None:
        directory = self._options.directory
        point = mountpoints.mounted_on(directory)
        if self._mounted and session.is_alive() and point is not None and point.fstype == mountpoints.FSTYPE:
            # Another place that shows the same mount keeps the session alive as well.
            for each in reversed(mountpoints.mount_points()):
                if each.device == point.device:
                    with suppress(CliError):
                        mountpoints.detach(each.directory)
        # So does a file that somebody still holds open; the end of the process closes it.
        session.join(END_TIMEOUT)
        log.info("stopped serving %s", escape_for_terminal(directory))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._wake.set()

    def _describe(self) -> Daemon:
        return Daemon(
            pid=os.getpid(),
            directory=self._options.directory,
            arch=self._options.machine.arch,
            layout=self._options.layout,
            version=__version__,
            started=datetime.now().astimezone().isoformat(timespec="seconds"),
        )


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
    start = _Start(options, build, log_file)
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
    start = _Start(options, build, None)
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


class Wake:
    """An event that a signal handler may set, for the main thread to wait for; there is one in a process.

    A handler runs when the main thread runs Python again. A wait for a lock goes on if the signal came just
    before it, or to another thread; reading a pipe is ended by the byte that the interpreter writes then.
    """

    def __init__(self) -> None:
        self._is_set = False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """From any thread."""
        self._is_set = True
        with suppress(BlockingIOError):
            os.write(self._writer, b"\0")

    def wait(self, others: Sequence[int] = (), timeout: float | None = None) -> Collection[int]:
        """Until it is set, or `others` can be read: which of these descriptors; for the main thread alone."""
        waiting = poll()
        for descriptor in (self._reader, *others):
            waiting.register(descriptor, POLLIN)
        while not self._is_set:
            found = dict(waiting.poll(None if timeout is None else timeout * 1000))
            if self._reader in found:
                os.read(self._reader, 64)
            elif found or timeout is not None:
                return found.keys()
        return ()


class _Start:
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
        """For the daemon: serve, and end the process."""
        os.close(self._reader)
        status = ExitStatus.FAILURE
        try:
            self._leave_terminal()
            _start_logging(logging.WARNING if self._is_own_log else logging.INFO, sys.stderr)
            given = _given_descriptors()
            service = Service(self._options, self._build, applies_definitions=False)
            service.run(self._watch_starter, lambda: self._become_ready(given))
            status = ExitStatus.OK
        except CliError as failure:
            why = last_line(sys.stderr.fileno()) if failure.is_explained else ""
            message = f"{failure}: {why}" if why else str(failure)
            log.error("%s", escape_for_terminal(message))
            if self._tell_reason(message, failure.status) and self._is_own_log:
                self._log_file.unlink(missing_ok=True)
        # This is a forked copy of the caller: nothing may get back into its frames.
        except BaseException as error:
            lacking = resource_hint(error)
            if lacking and self._tell_reason(lacking, ExitStatus.FAILURE):
                if self._is_own_log:
                    self._log_file.unlink(missing_ok=True)
            else:
                log.exception("the daemon failed")
                self._tell_reason(self._bug(f"{type(error).__name__}: {error}"), ExitStatus.FAILURE)
        finally:
            with suppress(BaseException):
                at_end()
            if self._is_own_log and status == ExitStatus.OK and not os.fstat(2).st_size:
                self._log_file.unlink(missing_ok=True)
            logging.shutdown()
            os._exit(status)

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
