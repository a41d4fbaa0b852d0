"""Who forked whom, and who got a name, told by the host's kernel: the process connector, for root alone."""

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
"""struct proc_event of a fork: what, cpu, timestamp; parent's pid and tgid, child's pid and tgid.

Of what else is heard the first pid is that of who has another name.
"""
_EVENT_AT = _HEADER.size + _CN_MSG.size
_FORK = 1
_EXEC = 2
_COMM = 0x200
_SO_RCVBUFFORCE = 33
_SO_ATTACH_FILTER = 26
_ROOM = 8 << 20
"""Bytes of events that may wait: some ten thousand forks between two requests."""
_FIRST_PID_NAMESPACE = 0xEFFFFFFC
"""Its inode. The connector speaks in its pids; Mirrors: include/linux/proc_ns.h:PROC_PID_INIT_INO (v6.1)."""
_ANSWER = 200
"""Milliseconds for the first word of the kernel's; in a container nothing comes."""
_FILTER = (
    (0x20, 0, 0, _EVENT_AT),
    (0x15, 2, 0, socket.htonl(_FORK)),
    (0x15, 1, 0, socket.htonl(_EXEC)),
    (0x15, 0, 1, socket.htonl(_COMM)),
    (0x06, 0, 0, 0xFFFFFFFF),
    (0x06, 0, 0, 0),
)
"""Classic BPF: load `what`, and keep these alone."""


class ForkEvents:
    """Parents of processes, from the moment that this is made. Raises: OSError (nobody tells)."""

    def __init__(self) -> None:
        # What other listeners asked for is heard everywhere: an event proves nothing.
        if os.stat("/proc/self/ns/pid").st_ino != _FIRST_PID_NAMESPACE:
            raise OSError(errno.EPERM, "the process connector tells pids of another namespace")
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
        # select(2) takes no descriptor beyond 1023.
        answer = select.poll()
        answer.register(self._socket, select.POLLIN)
        if not answer.poll(_ANSWER):
            raise OSError(errno.EPERM, "the process connector tells nothing here")
        # From here on the answer to the request isn't among what comes.
        self._socket.setblocking(False)
        code = b"".join(struct.pack("=HBBI", *instruction) for instruction in _FILTER)
        program = ctypes.create_string_buffer(code, len(code))
        self._socket.setsockopt(
            socket.SOL_SOCKET,
            _SO_ATTACH_FILTER,
            struct.pack("@HP", len(_FILTER), ctypes.addressof(program)),
        )
        self._socket.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _ROOM)

    def fileno(self) -> int:
        """What is readable once there is something to take."""
        return self._socket.fileno()

    def take(self) -> tuple[dict[int, int], set[int] | None]:
        """Parents by the pids of processes forked since the last call; not all, if there were too many.

        And who may have another name since, threads too; None: anybody.
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
