"""A debugger that speaks GDB's remote protocol, for tests of machine/gdb."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress

TIMEOUT = 60.0
"""Seconds that a test waits for an answer before the test fails."""
IP = {"x86_64": "10", "i386": "8", "riscv64": "20", "arm64": "20"}
"""Architecture -> number of the instruction pointer in a `p` packet, in hexadecimal."""


class GdbClient:
    """A debugger's connection to the socket at `path`."""

    def __init__(self, path: str, arch: str = "x86_64") -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(TIMEOUT)
        self._socket.connect(path)
        self._ip = IP[arch]
        self._data = b""
        assert self.ask("QStartNoAckMode") == "OK"

    def send(self, body: str | bytes) -> None:
        data = body.encode() if isinstance(body, str) else body
        self._socket.sendall(b"$" + data + b"#%02x" % (sum(data) & 0xFF))

    def send_until_blocked(self, body: str) -> None:
        """Send a packet repeatedly, without reading answers, until the server reads no more."""
        self._socket.settimeout(1)
        with suppress(TimeoutError):
            while True:
                self.send(body)

    def raw(self, data: bytes) -> None:
        self._socket.sendall(data)

    def answer(self) -> str:
        """Return the next packet of the server."""
        while True:
            start = self._data.find(b"$")
            end = self._data.find(b"#", start)
            if start >= 0 and len(self._data) >= end + 3 > 2 and end > start:
                body = self._data[start + 1 : end]
                told = self._data[end + 1 : end + 3]
                assert told == b"%02x" % (sum(body) & 0xFF)
                self._data = self._data[end + 3 :]
                return body.decode()
            data = self._socket.recv(1 << 16)
            if not data:
                raise EOFError
            self._data += data

    def ask(self, body: str | bytes) -> str:
        self.send(body)
        return self.answer()

    @property
    def ip(self) -> int:
        return int.from_bytes(bytes.fromhex(self.ask(f"p{self._ip}")), "little")

    def step(self) -> int:
        """Execute an instruction, and return the address of the next one."""
        assert self.ask("s") == "T05thread:1;"
        return self.ip

    def break_at(self, address: int, act: Callable[[], object]) -> Request:
        """Run `act` in another thread until the guest stops at a breakpoint at `address`; return the request
        of this thread.
        """
        assert self.ask(f"Z0,{address:x},4") == "OK"
        self.send("c")
        request = Request(act)
        assert self.answer() == "T05thread:1;"
        assert self.ip == address
        assert self.ask(f"z0,{address:x},4") == "OK"
        return request

    def memory(self, va: int, size: int) -> bytes:
        return bytes.fromhex(self.ask(f"m{va:x},{size:x}"))

    def close(self) -> None:
        self._socket.close()


class Request:
    """A request that another thread makes. The request may wait until the debugger lets the guest
    continue.
    """

    def __init__(self, act: Callable[[], object]) -> None:
        self.result: object = None
        self.error: BaseException | None = None

        def run() -> None:
            try:
                self.result = act()
            except BaseException as error:
                self.error = error

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()

    @property
    def waits(self) -> bool:
        return self._thread.is_alive()

    def done(self) -> object:
        """Wait for the request to end, and return its result."""
        self._thread.join(TIMEOUT)
        assert not self._thread.is_alive(), "the request still waits"
        if self.error is not None:
            raise self.error
        return self.result
