"""ForkEvents: receives forks and new process names from the host's process connector (root only)."""

from __future__ import annotations

import ctypes
import errno
import os
import select
import socket
import struct

_NETLINK_CONNECTOR = 11
_CN_IDX_PROC = 1
_LISTEN = 1
_NLMSG_DONE = 3
_HEADER = struct.Struct("=IHHII")
_CN_MSG = struct.Struct("=IIIIHH")
_EVENT = struct.Struct("=IIQIIII")
"""Layout of struct proc_event of a fork: what, cpu, timestamp; pid and tgid of parent and child.

In an exec or comm event, the first pid is that of the thread whose name has changed.
"""
_EVENT_AT = _HEADER.size + _CN_MSG.size
_FORK = 1
_EXEC = 2
_COMM = 0x200
_SO_RCVBUFFORCE = 33
_SO_ATTACH_FILTER = 26
_RECEIVE_BUFFER = 8 << 20
"""Size of the socket's receive buffer in bytes; enough for some ten thousand forks between two requests."""
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Inode number of the initial pid namespace, whose pids the connector reports.

Mirrors: include/linux/proc_ns.h:PROC_PID_INIT_INO (v6.1).
"""
_ANSWER_TIMEOUT_MS = 200
"""Milliseconds to wait for the kernel's first message; in a container, the kernel sends none."""
_FILTER = (
    (0x20, 0, 0, _EVENT_AT),
    (0x15, 2, 0, socket.htonl(_FORK)),
    (0x15, 1, 0, socket.htonl(_EXEC)),
    (0x15, 0, 1, socket.htonl(_COMM)),
    (0x06, 0, 0, 0xFFFFFFFF),
    (0x06, 0, 0, 0),
)
"""Classic BPF program that accepts only forks, execs and changes of the name, by the field `what`.

An instruction is (code, jt, jf, k), as in struct sock_filter.
"""


class ForkEvents:
    """Listens for forks and changes of names from its creation on.

    Raises: OSError (the kernel reports no events to this process).
    """

    def __init__(self) -> None:
        # Every listener receives the events that any listener asked for, so an event proves nothing.
        if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
            raise OSError(errno.EPERM, "process connector: it reports pids of another namespace")
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC, _NETLINK_CONNECTOR
        )
        try:
            self._listen()
        except BaseException:
            self._socket.close()
            raise

    def _listen(self) -> None:
        self._socket.bind((0, _CN_IDX_PROC))
        request = struct.pack("=I", _LISTEN)
        message = _CN_MSG.pack(_CN_IDX_PROC, 1, 0, 0, len(request), 0) + request
        self._socket.send(_HEADER.pack(_HEADER.size + len(message), _NLMSG_DONE, 0, 0, os.getpid()) + message)
        # select(2) takes no descriptor above 1023.
        answer = select.poll()
        answer.register(self._socket, select.POLLIN)
        if not answer.poll(_ANSWER_TIMEOUT_MS):
            raise OSError(errno.EPERM, "process connector: it reports no events here")
        # From here on the filter drops acknowledgements, which requests of other listeners cause too.
        self._socket.setblocking(False)
        code = b"".join(struct.pack("=HBBI", *instruction) for instruction in _FILTER)
        program = ctypes.create_string_buffer(code, len(code))
        self._socket.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("@HP", len(_FILTER), ctypes.addressof(program)),
        )
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when events have arrived."""
        return self._socket.fileno()

    def take(self) -> tuple[dict[int, int], set[int] | None]:
        """Return (forks, changed names) since the last call.

        forks: pid of a new process -> pid of its parent. If events were lost, the map is incomplete.
        changed names: pids of processes and threads whose names may have changed. If events were lost, this
        item is None, and any name may have changed.
        """
        found: dict[int, int] = {}
        named: set[int] = set()
        has_lost = False
        while True:
            try:
                data = self._socket.recv(1024)
            except BlockingIOError:
                return found, None if has_lost else named
            except OSError as error:
                if error.errno != errno.ENOBUFS:
                    raise
                has_lost = True
                continue
            if len(data) >= _EVENT_AT + _EVENT.size:
                what, _cpu, _time, pid, parent, child, leader = _EVENT.unpack_from(data, _EVENT_AT)
                if what != _FORK:
                    named.add(pid)
                    continue
                named.add(child)
                if child == leader:
                    found[child] = parent

    def close(self) -> None:
        self._socket.close()
