"""Service: serves one mount, from the build of its kernel to the unmount."""

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
from types import FrameType
from typing import TYPE_CHECKING

from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import replace
from emulated_kernel.util.threads import start_thread
from kprobefs import __version__
from kprobefs.common import compile_ahead, mountpoints
from kprobefs.common.daemon_registry import Daemon, Registration
from kprobefs.common.errors import CliError, escape_for_terminal, resource_hint
from kprobefs.daemon.apply_process import ApplyProcess
from kprobefs.daemon.log_writer import flush_log
from kprobefs.daemon.mount_namespace import NamespaceMembers
from kprobefs.daemon.systemd_watchdog import ServiceWatchdog, sd_notify, watchdog_interval
from kprobefs.daemon.unmount_watcher import Orphaned, UnmountWatcher
from kprobefs.daemon.wake import Wake
from kprobefs.definitions import dropins
from kprobefs.fuse.memory_reserve import share_heap
from kprobefs.mount_options import Builder, MountOptions

if TYPE_CHECKING:
    from kprobefs.fuse.operations import Server

log = logging.getLogger("kprobefs")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals at which the service ends."""
CLOSE_TIMEOUT = 1.0
"""Maximum seconds for closing the kernel before the unmount. Closing the kernel ends all waiting reads."""
END_TIMEOUT = 2.0
"""Maximum seconds for the end of the FUSE session after the unmount. After a timeout, the process exits."""
SWITCH_INTERVAL = 0.0002
"""Argument of sys.setswitchinterval(), in seconds.

The interval is short, because hooks of the emulator and requests compete for Python's interpreter lock.
"""
COLLECTIONS = 700, 10, 50
"""Thresholds of Python's garbage collection for its three generations; the first two are Python's own.

A full collection is rare, because it takes longer than the registration of 1000 probes.
"""
APPLY_TIMEOUT = 30.0
"""Maximum seconds that a start waits until the *.probes files are applied."""


class StartUp:
    """The phase of the start, after mounting, in which a child process applies the *.probes files.

    The phase is over when all files are applied, or after APPLY_TIMEOUT. After a timeout, the child process
    continues to apply the files.
    """

    def __init__(self, applying: ApplyProcess | None, wake: Wake) -> None:
        self._applying = applying
        self._wake = wake
        self._deadline = time.monotonic() + APPLY_TIMEOUT
        self.remark = "" if applying is None else "applying definitions"
        """Text for the service manager's status line: what this phase does, or that it failed; else "".

        It is "" if no child process applies files, or after all definitions were applied.
        """
        if applying is not None:
            wake.watch(applying.descriptor, self._read)

    def is_over(self) -> bool:
        """Return True if no child process applies files any more, or if the timeout has passed."""
        return self._applying is None or time.monotonic() > self._deadline

    def seconds_left(self) -> float:
        """Return the number of seconds until APPLY_TIMEOUT has passed; 0 if it has."""
        return max(0, self._deadline - time.monotonic())

    def _read(self) -> None:
        assert self._applying is not None
        outcome = self._applying.read()
        if outcome is not None:
            self._wake.ignore(self._applying.descriptor)
            self._applying = None
            self.remark = outcome


class WatchdogReports:
    """Receives the reports of the watchdog process about the state of the mount.

    At each report, this object sends a keep-alive to the service manager.
    """

    def __init__(self, watchdog: ServiceWatchdog | None, wake: Wake) -> None:
        self.condition = "serving"
        """The latest state of the mount that the watchdog process has reported.

        It is `serving` before the first report.
        """
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
            log.error("the watchdog process has ended: the mount's state is no longer checked")


class ServiceStatus:
    """Sends the service's status to the service manager: readiness once, and each new status line."""

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._is_ready = False
        self._sent = ""

    def report(self, condition: str, remark: str, *, is_ready: bool) -> None:
        """Send the status if it has changed, and READY=1 when `is_ready` is true for the first time.

        `condition`: state of the mount. `remark`: text about the phase of the start, or "".
        """
        status = f"{condition} {self._directory}{remark and ': '}{remark}"
        if is_ready and not self._is_ready:
            self._is_ready = True
            sd_notify("READY=1", f"STATUS={status}")
        elif status != self._sent:
            sd_notify(f"STATUS={status}")
        self._sent = status


class Service:
    """Serves one mount.

    The object must run in the main thread, because it handles signals.
    """

    def __init__(self, options: MountOptions, build: Builder, *, applies_definitions: bool) -> None:
        """Create a service. run() calls `build` to build the kernel, and serves the mount.

        `applies_definitions`: whether the service applies the *.probes files. If False, the process that
        starts the daemon applies them.
        """
        self._options = options
        self._build = build
        self._applies_definitions = applies_definitions
        self._wake = Wake()
        self._companions = NamespaceMembers()
        self._mounted = False
        self._failure: CliError | None = None

    def run(
        self,
        on_registered: Callable[[], None] = lambda: None,
        on_prepared: Callable[[], None] = lambda: None,
        on_ready: Callable[[], object] = lambda: None,
        orphaned: Orphaned | None = None,
    ) -> None:
        """Serve the mount until SIGTERM, SIGINT, SIGHUP or umount.

        Call `on_registered` when no other daemon can serve the directory any more, `on_prepared` before the
        first thread starts, and `on_ready` when the mount answers. If the daemon is killed, another process
        (UnmountWatcher) unmounts the mount. If `orphaned` is given, UnmountWatcher's process then also waits
        for the end of the daemon's parent, and calls `orphaned.clean_up`.

        Raises: CliError (the mount cannot be prepared or served).
        """
        mountpoints.check_proc()
        share_heap()
        # Hazard: libfuse handles signals that have the default action, so install handlers before it starts.
        for number in SIGNALS:
            signal.signal(number, self._on_signal)
        watchdog = None
        watcher = None
        with Registration(self._describe(), mountpoints.is_mounted) as registration:
            try:
                on_registered()
                with mountpoints.prepared(
                    self._options.directory,
                    make=self._options.make_directory,
                    allow_other=self._options.allow_other,
                ):
                    interval = watchdog_interval()
                    if interval is not None:
                        watchdog = ServiceWatchdog(self._options.directory, interval)
                        self._companions.add(watchdog.pid)
                    watcher = UnmountWatcher(self._options.directory, orphaned)
                    self._companions.add(watcher.pid)
                    on_prepared()
                    self._serve(watchdog, watcher, registration, on_ready)
            finally:
                if watcher is not None:
                    watcher.end()
                if watchdog is not None:
                    watchdog.end()
            # The log is removed if it is empty.
            flush_log()

    def _serve(
        self,
        watchdog: ServiceWatchdog | None,
        watcher: UnmountWatcher,
        registration: Registration,
        on_ready: Callable[[], object],
    ) -> None:
        from kprobefs.fuse.operations import FuseOptions, Server

        # The kernel's objects live as long as the mount. Frozen, they do not slow down full collections.
        gc.disable()
        served = self._build(self._options)
        compile_ahead.end()
        traps = "native" if served.has_native_traps else "python"
        arch = served.architecture or registration.daemon.arch
        # If there is no space for the longer record, `status` continues to show the first one.
        with suppress(CliError):
            registration.write(replace(registration.daemon, traps=traps, arch=arch))
        log.info("hits of handlers in guest code: traps are %s", traps)
        gc.freeze()
        gc.set_threshold(*COLLECTIONS)
        gc.enable()
        fuse = FuseOptions(
            self._options.source,
            allow_other=self._options.allow_other,
            is_ordered=self._options.is_ordered,
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
            point = mountpoints.mounted_on(self._options.directory)
            if point is not None and point.fstype == mountpoints.FSTYPE:
                watcher.leave(point.device)
            on_ready()
            log.info("serving %s", directory)
            applying = ApplyProcess(self._options.directory) if self._has_definitions() else None
            self._wait(watchdog, StartUp(applying, self._wake))
            sd_notify("STOPPING=1")
            if applying is not None:
                applying.end()
        server.stop()
        # close() waits for the request that holds the control lock, which may take long.
        closing: threading.Thread | None = None
        with suppress(KernelError):
            closing = start_thread("close", served.close)
            closing.join(CLOSE_TIMEOUT)
        self._end(session)
        # If the host had no thread for close(), call it here: without a session no request holds the lock.
        if closing is None and not session.is_alive():
            served.close()
        if self._failure is not None:
            raise self._failure

    def _has_definitions(self) -> bool:
        return self._applies_definitions and bool(dropins.files())

    def _wait(self, watchdog: ServiceWatchdog | None, start_up: StartUp) -> None:
        """Wait until the service must end. In the meantime, send the mount's state to the service manager.

        `watchdog`: the process that checks the mount's state; None if the service manager expects no
        keep-alives. `start_up`: the phase in which the *.probes files are applied.
        """
        status = ServiceStatus(escape_for_terminal(self._options.directory))
        reports = WatchdogReports(watchdog, self._wake)
        while True:
            is_over = start_up.is_over()
            status.report(reports.condition, start_up.remark, is_ready=is_over)
            ready = self._wake.wait(self._companions.interval if is_over else start_up.seconds_left())
            if self._wake.is_set():
                return
            if not ready and is_over and self._companions.all_exited():
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
            if not self._mounted and not self._wake.is_set():
                # No thread could answer the first request.
                self._failure = CliError(resource_hint(MemoryError()))
        except CliError as failure:
            if self._wake.is_set():
                # After an unmount, libfuse's loop may return an error.
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
            # Bind mounts of the same file system keep the session alive too.
            for each in reversed(mountpoints.mount_points()):
                if each.device == point.device:
                    with suppress(CliError):
                        mountpoints.detach(each.directory)
        # An open file also keeps the session alive, until the process exits.
        session.join(END_TIMEOUT)
        log.info("stopped serving %s", escape_for_terminal(directory))

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._wake.set()

    def _describe(self) -> Daemon:
        now = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        return Daemon(
            pid=os.getpid(),
            directory=self._options.directory,
            arch=self._options.machine.arch,
            layout=self._options.layout,
            version=__version__,
            started=f"{now[:-2]}:{now[-2:]}",
            kernel=self._options.kernel_name,
            profile=self._options.profile_name,
            state=self._options.state or "",
            clock=self._options.machine.clock,
            options=self._options.kernel_words,
            isolate=self._options.isolate,
        )
