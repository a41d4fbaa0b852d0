"""The user namespace of a command under `--as-system`, and the helper process of the namespace.

In a user namespace of its own, the command cannot reach the host's tracefs and debugfs. The kernel does not
allow the command to mount a tracefs or debugfs, to unmount a mount that covers one, or to reach one through
other processes. The helper process stays outside of the user namespace, and maps the ids.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import select
import selectors
import signal
import socket
from collections.abc import Callable
from contextlib import suppress

from kprobefs.cli.as_system_calls import CallAnswerer, errno_of
from kprobefs.cli.as_system_filter import install_filter
from kprobefs.common.errors import CliError, ExitStatus

CLONE_NEWNS = 0x00020000
CLONE_NEWUSER = 0x10000000
MS_REC = 0x4000
MS_PRIVATE = 1 << 18
MS_SHARED = 1 << 20
MESSAGE_SIZE = 256
_MAP = b"map %d"
_LISTENER = b"listener %d"

_libc = ctypes.CDLL(None, use_errno=True)


class CommandNamespace:
    """The namespaces that a command enters between fork and exec, and the seccomp filter that it installs."""

    def __init__(self, answerer: CallAnswerer | None, *, own_user: bool) -> None:
        """Start the helper process, and test enter() in a child process, which then ends.

        `answerer`: answers the system calls that the filter passes on; if it is None, the filter passes on
        none. `own_user`: whether the command enters a user namespace of its own, in which perf_event_open(2)
        is refused; if False, it enters no namespace.

        Raises: CliError (the host allows no further user namespace).
        """
        self._own_user = own_user
        self._listens = answerer is not None
        pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours, theirs = map(_above_standard_streams, pair)
        self._helper = _forked(lambda: _Helper(theirs, answerer).run(), keep=theirs.fileno())
        theirs.close()
        self.unanswered = ""
        """Reason why kprobefs can't answer the filtered system calls; "" if it can."""
        self._try()

    def enter(self) -> None:
        """Move this process to the namespaces and install the filter.

        Afterwards the process executes the command. Raises: OSError.
        """
        if self._own_user:
            self._enter_user()
        if self._listens:
            listener = install_filter(own_user=self._own_user, listen=True)
            assert listener is not None
            socket.send_fds(self._ours, [_LISTENER % os.getpid()], [listener])
            os.close(listener)
            self._confirmed()
        elif self._own_user:
            # If the filter cannot be installed, perf_event_paranoid and the user namespace still refuse
            # perf_event_open(2).
            with suppress(OSError):
                install_filter(own_user=True, listen=False)

    def close(self) -> None:
        """Disconnect from the helper, which ends after the last process whose calls it answers."""
        self._ours.close()

    def _enter_user(self) -> None:
        # One call creates both namespaces, so that the mounts in the new one are locked and no mount can be
        # uncovered.
        if _libc.unshare(CLONE_NEWUSER | CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        self._ours.send(_MAP % os.getpid())
        self._confirmed()
        # Hazard: if an unmount outside also removed the mount here, it would uncover the host's tracefs.
        if _libc.mount(b"none", b"/", b"none", MS_REC | MS_PRIVATE, None):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        # Some readers of mountinfo need the optional field that only shared mounts have. systemd's mounts are
        # shared.
        _libc.mount(b"none", b"/sys", b"none", MS_REC | MS_SHARED, None)

    def _confirmed(self) -> None:
        own = os.getpid()
        asker = 0
        failure = errno.EIO
        while asker != own:
            # There may be answers to another process, which was killed before it read them.
            answer = self._ours.recv(MESSAGE_SIZE)
            asker, failure = map(int, answer.split()) if answer else (own, errno.EIO)
        if failure:
            raise OSError(failure, os.strerror(failure))

    def _try(self) -> None:
        """Test enter() in a child process: first without the filter's listener, then with it.

        If only the second test fails, store the reason in `unanswered`; enter() then creates no listener.
        Raises: CliError (the host allows no further user namespace).
        """
        listens = self._listens
        self._listens = False
        if failure := errno_of(self.enter):
            self.close()
            raise CliError(
                f"--as-system: a user namespace: {os.strerror(failure)};"
                " allow them (sysctl user.max_user_namespaces), or give --real-root as root",
                ExitStatus.RUN_FAILED,
            )
        if listens:
            self._listens = True
            if failure := errno_of(self.enter):
                self.unanswered = os.strerror(failure)
                self._listens = False


class _Helper:
    """The helper process, which maps ids and answers the filtered calls.

    For this, it keeps the rights that the command gives up.
    """

    def __init__(self, connection: socket.socket, answerer: CallAnswerer | None) -> None:
        self._connection = connection
        self._answerer = answerer
        self._selector = selectors.DefaultSelector()

    def run(self) -> None:
        """Map ids and answer filtered calls, until `kprobefs run` and all processes with the filter end."""
        self._selector.register(self._connection, selectors.EVENT_READ)
        while self._selector.get_map():
            for key, _ in self._selector.select():
                if key.fileobj is self._connection:
                    self._receive()
                else:
                    self._serve(key.fd)

    def _receive(self) -> None:
        try:
            message, descriptors, _, _ = socket.recv_fds(self._connection, MESSAGE_SIZE, 1)
        except ConnectionResetError:
            # The other end of the connection was closed before it read an answer.
            message = b""
            descriptors = []
        if not message:
            self._selector.unregister(self._connection)
            return
        for listener in descriptors:
            self._selector.register(listener, selectors.EVENT_READ)
        asker = int(message.split()[1])
        failure = 0
        if not descriptors:
            try:
                _map_ids(asker)
            except OSError as refused:
                failure = refused.errno or errno.EIO
        with suppress(OSError):
            self._connection.send(b"%d %d" % (asker, failure))

    def _serve(self, listener: int) -> None:
        if _has_hung_up(listener):
            self._selector.unregister(listener)
            os.close(listener)
        elif self._answerer is not None:
            self._answerer.serve(listener)


def _has_hung_up(listener: int) -> bool:
    """Return True if no process has the filter that belongs to the seccomp descriptor `listener` any more."""
    waiter = select.poll()
    waiter.register(listener, select.POLLIN)
    return any(not event & select.POLLIN for _, event in waiter.poll(0))


def _map_ids(pid: int) -> None:
    """Map each id in the user namespace of process `pid` to the equal id in the namespace of this process.

    Raises: OSError.
    """
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}", encoding="ascii") as lines:
            ranges = [line.split() for line in lines]
        text = "".join(f"{first} {first} {count}\n" for first, _, count in ranges)
        descriptor = os.open(f"/proc/{pid}/{name}", os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, text.encode())
        finally:
            os.close(descriptor)


def _above_standard_streams(connection: socket.socket) -> socket.socket:
    """Close a socket, and return a copy whose descriptor is at least 3.

    If a standard stream is closed, a new socket may get its number, 0 to 2.
    """
    number = fcntl.fcntl(connection, fcntl.F_DUPFD_CLOEXEC, 3)
    connection.close()
    return socket.socket(fileno=number)


def _forked(serve: Callable[[], None], keep: int) -> int:
    """Fork a process that calls `serve` and ends afterwards; return its pid.

    The process may outlive this one. It keeps no descriptor except `keep`.
    """
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        os.chdir("/")
        for ending in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(ending, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for number in range(3):
            os.dup2(null, number)
        os.closerange(3, keep)
        os.closerange(keep + 1, os.sysconf("SC_OPEN_MAX"))
        serve()
    finally:
        os._exit(0)
