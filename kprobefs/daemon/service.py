"""Service: one mount, from building its kernel to the end."""

from __future__ import annotations

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from types import FrameType
from typing import TYPE_CHECKING

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.threads import start_thread
from kprobefs import __version__
from kprobefs.common import mountpoints
from kprobefs.common.daemon_registry import Daemon, Registration
from kprobefs.common.errors import CliError, escape_for_terminal
from kprobefs.daemon.apply_process import ApplyProcess
from kprobefs.daemon.mount_namespace import NamespaceMembers
from kprobefs.daemon.systemd_watchdog import ServiceWatchdog, sd_notify, watchdog_interval
from kprobefs.daemon.wake import Wake
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


class StartUp:
    """The part of a start after the mount: its definitions are applied.

    It is over when they are, or have taken too long. The process that applies them goes on then.
    """

    def __init__(self, applying: ApplyProcess | None, wake: Wake) -> None:
        self._applying = applying
        self._wake = wake
        self._deadline = time.monotonic() + APPLY_TIMEOUT
        self.remark = "" if applying is None else "applying definitions"
        """What the service manager shows of it."""
        if applying is not None:
            wake.watch(applying.descriptor, self._read)

    def is_over(self) -> bool:
        """Whether the start waits for nothing any more."""
        return self._applying is None or time.monotonic() > self._deadline

    def seconds_left(self) -> float:
        """Return how long the start still waits."""
        return max(0, self._deadline - time.monotonic())

    def _read(self) -> None:
        assert self._applying is not None
        outcome = self._applying.read()
        if outcome is not None:
            self._wake.ignore(self._applying.descriptor)
            self._applying = None
            self.remark = outcome


class WatchdogReports:
    """What the watchdog's process hears from the mount; each answer is a sign of life of the service."""

    def __init__(self, watchdog: ServiceWatchdog | None, wake: Wake) -> None:
        self.condition = "serving"
        self._watchdog = watchdog
        self._wake = wake
        if watchdog is not None:
            watchdog.start()
            wake.watch(watchdog.descriptor, self._read)

    def _read(self) -> None:
        assert self._watchdog is not None
        answer = self._watchdog.answer()
        if answer:
            sd_notify("WATCHDOG=1")
            self.condition = answer
        else:
            self._wake.ignore(self._watchdog.descriptor)
            log.error("nothing asks the mount for its state any more")


class ServiceStatus:
    """What the service manager has been told: each new status, and once that the service is ready."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._is_ready = False
        self._sent = ""

    def report(self, condition: str, remark: str, *, is_ready: bool) -> None:
        """Send what is new."""
        status = f"{condition} {self._directory}{remark and ': '}{remark}"
        if is_ready and not self._is_ready:
            self._is_ready = True
            sd_notify("READY=1", f"STATUS={status}")
        elif status != self._sent:
            sd_notify(f"STATUS={status}")
        self._sent = status


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
        watchdog = None
        try:
            with mountpoints.prepared(
                self._options.directory,
                make=self._options.make_directory,
                allow_other=self._options.allow_other,
            ):
                interval = watchdog_interval()
                if interval is not None:
                    watchdog = ServiceWatchdog(self._options.directory, interval)
                    self._companions.add(watchdog.pid)
                on_prepared()
                self._serve(watchdog, on_ready)
        finally:
            if watchdog is not None:
                watchdog.end()
            registration.close()

    def _serve(self, watchdog: ServiceWatchdog | None, on_ready: Callable[[], object]) -> None:
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
            self._wait(watchdog, StartUp(applying, self._wake))
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

    def _wait(self, watchdog: ServiceWatchdog | None, start_up: StartUp) -> None:
        """Wait until it is time to end; meanwhile the service manager hears what the mount answers."""
        status = ServiceStatus(escape_for_terminal(self._options.directory))
        reports = WatchdogReports(watchdog, self._wake)
        while True:
            is_over = start_up.is_over()
            status.report(reports.condition, start_up.remark, is_ready=is_over)
            ready = self._wake.wait(self._companions.interval if is_over else start_up.seconds_left())
            if self._wake.is_set():
                return
            if not ready and is_over and self._companions.have_gone():
                log.info("nobody else is left in the mount namespace")
                return
            for handle in ready:
                handle()

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
