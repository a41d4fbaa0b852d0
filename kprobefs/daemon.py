"""The daemon: builds the kernel, serves the mount until a signal or umount, cleans up."""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, BinaryIO, NoReturn

from kprobefs import __version__, mount
from kprobefs.failure import Exit, Failure
from kprobefs.options import Builder, MountOptions
from kprobefs.registry import Daemon, Registration, log_path
from kprobefs.sd_notify import sd_notify

if TYPE_CHECKING:
    from kprobefs.adapter import Server

log = logging.getLogger("kprobefs")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
END_TIMEOUT = 2.0
"""Seconds that the session may take to end once it is unmounted; the process ends anyhow."""
SWITCH_INTERVAL = 0.0002
"""Seconds. Handlers of the emulator compete with requests for the interpreter; see sys.setswitchinterval."""
FULL_COLLECTIONS = 50
"""Collections of younger garbage for each full one, which takes longer than registering a thousand probes."""
READY = b"\0"
PR_SET_PDEATHSIG = 1


class Service:
    """One mount, from building its kernel to the end. Needs the main thread, for signals."""

    def __init__(self, options: MountOptions, build: Builder) -> None:
        self._options = options
        self._build = build
        self._wake = Wake()
        self._mounted = False
        self._failure: Failure | None = None

    def run(self, on_ready: Callable[[], None]) -> None:
        """Serve until SIGTERM, SIGINT, SIGHUP or umount; `on_ready` is called once the mount answers.

        Raises: Failure.
        """
        # Before libfuse is loaded: it takes signals that still have their default action.
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        registration = Registration(self._describe())
        try:
            self._serve(on_ready)
        finally:
            registration.close()

    def _serve(self, on_ready: Callable[[], None]) -> None:
        mount.prepare(self._options.directory)
        from kprobefs.adapter import FuseOptions, Server

        # What the kernel is made of stays; it would be looked at by each full collection.
        gc.disable()
        served = self._build(self._options)
        gc.freeze()
        gc.set_threshold(*gc.get_threshold()[:2], FULL_COLLECTIONS)
        gc.enable()
        shared = os.geteuid() == 0 and not self._options.private
        server = Server(served, FuseOptions(self._options.source, allow_other=shared))
        if self._wake.is_set():
            return
        sys.setswitchinterval(SWITCH_INTERVAL)
        ready = threading.Event()
        session = threading.Thread(target=self._session, args=(server, ready), name="fuse", daemon=True)
        session.start()
        ready.wait()
        if self._mounted:
            sd_notify("READY=1", f"STATUS=serving {self._options.directory}")
            log.info("serving %s", self._options.directory)
            on_ready()
            self._wake.wait()
            sd_notify("STOPPING=1")
        server.stop()
        served.close()
        self._end(session)
        if self._failure is not None:
            raise self._failure

    def _session(self, server: Server, ready: threading.Event) -> None:
        def mounted() -> None:
            self._mounted = True
            ready.set()

        try:
            server.serve(self._options.directory, mounted)
        except Failure as failure:
            if self._wake.is_set():
                # Unmounted under its threads, libfuse's loop may end with an error of its own.
                log.info("the session ended: %s", failure)
            else:
                self._failure = failure
        except Exception as error:
            log.exception("the FUSE session failed")
            self._failure = Failure(f"{self._options.directory}: {error}: this is a bug")
        finally:
            self._wake.set()
            ready.set()

    def _end(self, session: threading.Thread) -> None:
        directory = self._options.directory
        point = mount.mounted_on(directory)
        if self._mounted and session.is_alive() and point is not None and point.fstype == mount.FSTYPE:
            with suppress(Failure):
                mount.detach(directory)
        # A file that somebody still holds open keeps the session alive; the end of the process closes it.
        session.join(END_TIMEOUT)
        log.info("stopped serving %s", directory)

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


def run_in_foreground(options: MountOptions, build: Builder, log_file: Path | None = None) -> None:
    """Serve in this process. Raises: Failure."""
    _start_logging(log_file)
    Service(options, build).run(on_ready=lambda: None)


def start_in_background(options: MountOptions, build: Builder, log_file: Path | None = None) -> None:
    """Start a daemon, and return when its mount answers. Raises: Failure with the daemon's reason."""
    log_file = log_file or log_path(options.directory)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.setsid()
        if os.fork() == 0:
            _daemon(options, build, log_file, _Report(writer))
        os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    _await_ready(reader, log_file)


def start_as_child(options: MountOptions, build: Builder, log_file: Path) -> int:
    """Start a daemon that ends with its parent; its pid, when its mount answers. Raises: Failure."""
    reader, writer = os.pipe()
    parent = os.getpid()
    child = os.fork()
    if child == 0:
        os.close(reader)
        # A session of its own: an interrupt from the terminal is for the command. Until the service has its
        # handlers the caller's would swallow the signal of the parent's death.
        os.setsid()
        for number in SIGNALS:
            signal.signal(number, signal.SIG_DFL)
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(Exit.FAILURE)
        _daemon(options, build, log_file, _Report(writer))
    os.close(writer)
    try:
        _await_ready(reader, log_file)
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

    def wait(self) -> None:
        """For the main thread alone."""
        while not self._is_set:
            os.read(self._reader, 64)


class _Report:
    """The daemon's end of the readiness pipe; it takes one message."""

    def __init__(self, descriptor: int) -> None:
        self._pipe: BinaryIO | None = os.fdopen(descriptor, "wb")

    def send(self, message: bytes) -> None:
        """Tell who started the daemon; nothing after the first time."""
        # Who started it may be gone.
        with suppress(BrokenPipeError):
            if self._pipe is not None:
                self._pipe.write(message)
                self._pipe.close()
        self._pipe = None


def _daemon(options: MountOptions, build: Builder, log_file: Path, report: _Report) -> NoReturn:
    status = Exit.FAILURE
    try:
        _leave_terminal(log_file)
        _start_logging(None)
        Service(options, build).run(on_ready=lambda: report.send(READY))
        status = Exit.OK
    except Failure as failure:
        log.error("%s", failure)
        report.send(str(failure).encode(errors="surrogateescape"))
    # This is a forked copy of the caller: nothing may get back into its frames.
    except BaseException:
        log.exception("the daemon failed")
    finally:
        logging.shutdown()
        os._exit(status)


def _await_ready(reader: int, log_file: Path) -> None:
    with os.fdopen(reader, "rb") as pipe:
        answer = pipe.read()
    if answer == READY:
        return
    raise Failure(
        answer.decode(errors="surrogateescape") or f"the daemon failed at its start: see {log_file}"
    )


def _leave_terminal(log_file: Path) -> None:
    os.chdir("/")
    null = os.open(os.devnull, os.O_RDONLY)
    output = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o600)
    for target, source in ((0, null), (1, output), (2, output)):
        os.dup2(source, target)


def _start_logging(log_file: Path | None) -> None:
    form = "%(asctime)s %(name)s[%(process)d]: %(levelname)s: %(message)s"
    if log_file is not None:
        logging.basicConfig(level=logging.INFO, format=form, filename=log_file)
    elif "JOURNAL_STREAM" in os.environ:
        logging.basicConfig(level=logging.INFO, format="%(levelname)s: %(message)s", stream=sys.stderr)
    else:
        logging.basicConfig(level=logging.INFO, format=form, stream=sys.stderr)
