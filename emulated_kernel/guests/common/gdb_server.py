"""GdbServer: GDB's remote protocol on a unix socket, for one debugger at a time.

Source: the GDB manual, appendix "GDB Remote Serial Protocol".
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import select
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress

from emulated_kernel.machine.debugger import Debugger
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.threads import start_thread

PACKET_LIMIT = 16 << 10
"""Maximum size of a packet in bytes."""
_SLICE = 0.05
"""Seconds between two checks whether a running guest has stopped."""
_RETRY = 0.2
"""Seconds until the server accepts a connection again after an error."""
_PREFIX = "kprobefs-gdb-"
_SOCKET = "socket"
_STOP = b"."
"""Byte that is written to a session's pipe when the guest stops by itself."""
_INTERRUPT = 3
_TRAP = 5
_SIGINT = 2
_NOTHING = b""
_OK = b"OK"
_ERROR = b"E01"
_BAD_MEMORY = b"E0e"


def _sized(names: str, size: int) -> tuple[tuple[str, int], ...]:
    return tuple((name, size) for name in names.split())


_X86_64 = (
    *_sized("ax bx cx dx si di bp sp r8 r9 r10 r11 r12 r13 r14 r15 ip", 8),
    *_sized("flags cs ss ds es fs gs", 4),
)
_I386 = _sized("ax cx dx bx sp bp si di ip flags cs ss ds es fs gs", 4)
_RISCV = (
    ("", 8),
    *_sized("ra sp gp tp t0 t1 t2 s0 s1 a0 a1 a2 a3 a4 a5 a6 a7", 8),
    *_sized("s2 s3 s4 s5 s6 s7 s8 s9 s10 s11 t3 t4 t5 t6 ip", 8),
)
_ARM64 = (*_sized(" ".join(f"x{number}" for number in range(31)), 8), ("sp", 8), ("ip", 8), ("flags", 4))
_LAYOUTS = {
    "x86_64": ("i386:x86-64", _X86_64),
    "i386": ("i386", _I386),
    "riscv64": ("riscv:rv64", _RISCV),
    "riscv64i": ("riscv:rv64", _RISCV),
    "arm64": ("aarch64", _ARM64),
}
"""Architecture -> (GDB's name of the architecture, the first registers in GDB's order).

A register is (name, size in bytes). The name "" is that of a register whose value is always 0.
"""
_BREAKPOINT = re.compile(rb"([Zz])[01],([0-9a-f]{1,16}),[0-9a-f]{1,8}")
_MEMORY = re.compile(rb"([mM])([0-9a-f]{1,16}),([0-9a-f]{1,8})(?::([0-9a-f]*))?")
_REGISTER = re.compile(rb"([pP])([0-9a-f]{1,4})(?:=([0-9a-f]*))?")
_FEATURES = re.compile(rb"qXfer:features:read:target\.xml:([0-9a-f]{1,8}),([0-9a-f]{1,8})")
_ADDRESSES = 1 << 64


def remove_stale(place: str) -> None:
    """Remove the directories of GDB sockets that killed daemons have left in the directory `place`.

    A living daemon holds a lock of its directory. Only this user's directories are removed.
    """
    for name in os.listdir(place):
        path = os.path.join(place, name)
        if name.startswith(_PREFIX):
            with suppress(OSError):
                _remove_unlocked(path)


def _remove_unlocked(path: str) -> None:
    """Remove the directory of a GDB socket if it belongs to this user.

    Raises: OSError (also if the daemon that made the directory still runs, and so holds its lock).
    """
    directory = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(directory).st_uid != os.geteuid():
            return
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
        with suppress(FileNotFoundError):
            os.unlink(_SOCKET, dir_fd=directory)
        os.rmdir(path)
    finally:
        os.close(directory)


class GdbServer:
    """Serves gdb on the socket `path`, which is in a directory that only the daemon's user can open.

    Raises: KernelError ENAMETOOLONG (a socket's path has at most 107 bytes), OSError (the directory or the
    socket cannot be created).
    """

    def __init__(self, debugger: Debugger) -> None:
        self._debugger = debugger
        remove_stale(tempfile.gettempdir())
        self._closing = threading.Event()
        self._connection: socket.socket | None = None
        """The debugger's connection; None without a debugger."""
        with ExitStack() as unless_made:
            directory = tempfile.mkdtemp(prefix=_PREFIX)
            unless_made.callback(os.rmdir, directory)
            self._directory = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            unless_made.callback(os.close, self._directory)
            # remove_stale() of other daemons leaves a locked directory alone.
            fcntl.flock(self._directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self.path = os.path.join(directory, _SOCKET)
            self._listener = unless_made.enter_context(socket.socket(socket.AF_UNIX))
            self._bind()
            unless_made.callback(os.unlink, self.path)
            os.chmod(self.path, 0o600)
            self._listener.listen(1)
            self._thread = start_thread("kprobefs-gdb", self._serve)
            self._resources = unless_made.pop_all()

    def _bind(self) -> None:
        try:
            self._listener.bind(self.path)
        except OSError as error:
            number = error.errno or errno.ENAMETOOLONG
            raise KernelError(number, f"gdb: {self.path} cannot be bound; choose a shorter TMPDIR") from error

    def close(self) -> None:
        """End the session and remove the socket; further calls do nothing."""
        if self._closing.is_set():
            return
        self._closing.set()
        # shutdown() wakes accept(), which close() does not.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        # A debugger that doesn't read its answers blocks the thread in send().
        connection = self._connection
        if connection is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        # The user may have removed the socket or its directory.
        with suppress(OSError):
            self._resources.close()

    def _serve(self) -> None:
        while not self._closing.is_set():
            try:
                connection, _ = self._listener.accept()
            except OSError:
                # The connection may have ended, or the daemon has no descriptor left for it.
                self._closing.wait(_RETRY)
                continue
            self._connection = connection
            with connection, suppress(OSError):
                session = GdbSession(self._debugger, connection, self._closing)
                try:
                    session.serve()
                finally:
                    self._debugger.detach(self._closing.is_set)
                    session.close()


class GdbSession:
    """One connection of a debugger."""

    def __init__(self, debugger: Debugger, connection: socket.socket, closing: threading.Event) -> None:
        self._debugger = debugger
        self._machine = debugger.machine
        self._connection = connection
        self._closing = closing
        self._received = bytearray()
        self._stops, self._stop_writer = os.pipe()
        """Ends of a pipe, for reading and writing. The pipe gets a byte when the guest stops by itself."""
        self._acknowledges = True
        self._thread = 1
        """Number of the thread whose registers gdb reads and writes: the number of a virtual CPU, plus 1."""
        self._is_done = False
        self._is_passed = False
        """Whether gdb has skipped a probe's breakpoint by a write of ip since the guest stopped."""
        self._is_step = False
        """Whether gdb's next request to continue is in fact a single step over a probe's breakpoint."""
        self._steps_by_breakpoints = debugger.machine.model.name.startswith("riscv")
        """Whether gdb uses breakpoints to execute single steps on this processor."""
        self._architecture, self._layout = _LAYOUTS[debugger.machine.model.name]
        self._exact: dict[bytes, Callable[[], bytes]] = {
            b"?": lambda: self._stopped(_TRAP),
            b"g": self._registers,
            b"D": self._detach,
            b"k": self._detach,
            b"vMustReplyEmpty": lambda: _NOTHING,
            b"vCont?": lambda: b"vCont;c;C;s;S",
            b"qC": lambda: b"QC%x" % (self._machine.cpu + 1),
            b"qAttached": lambda: b"1",
            b"qsThreadInfo": lambda: b"l",
            b"qfThreadInfo": lambda: b"m" + b",".join(b"%x" % number for number in self._threads),
            b"QStartNoAckMode": self._stop_acknowledging,
        }

    @property
    def _threads(self) -> range:
        return range(1, len(self._machine.per_cpu_bases) + 1)

    def serve(self) -> None:
        """Hold the guest, and answer packets until the debugger leaves.

        Raises: OSError (the connection fails).
        """
        self._debugger.on_stop = self._note_stop
        self._debugger.attach(self._closing.is_set)
        self._thread = self._machine.cpu + 1
        while not self._is_done and not self._closing.is_set():
            packet = self._next(_SLICE)
            if packet is None:
                continue
            self._send(self._answer(packet))

    def _note_stop(self) -> None:
        # If the session has ended, the pipe is closed.
        with suppress(OSError):
            os.write(self._stop_writer, _STOP)

    def close(self) -> None:
        """Close the session's pipe. Call this after Debugger.detach()."""
        self._debugger.on_stop = lambda: None
        os.close(self._stops)
        os.close(self._stop_writer)

    # Packets

    def _next(self, timeout: float) -> bytes | None:
        """Return the next packet, or the byte 3 if the debugger requests an interrupt.

        Return None if no packet is complete after `timeout` seconds, or if the guest stops earlier.

        Raises: ConnectionError (the debugger has closed the connection, or sends too much data that is no
        packet).
        """
        found = self._parsed()
        if found is not None:
            return found
        connection = self._connection.fileno()
        readable = select.select([connection, self._stops], [], [], timeout)[0]
        if self._stops in readable:
            os.read(self._stops, len(_STOP))
        if connection not in readable:
            return None
        data = self._connection.recv(PACKET_LIMIT)
        if not data:
            raise ConnectionError
        self._received += data
        if len(self._received) > 2 * PACKET_LIMIT:
            raise ConnectionError
        return self._parsed()

    def _parsed(self) -> bytes | None:
        data = self._received
        while data:
            if data[0] == _INTERRUPT:
                del data[0]
                return bytes((_INTERRUPT,))
            if data[0] != ord("$"):
                # An acknowledgement, or noise.
                del data[0]
                continue
            end = data.find(b"#")
            if end < 0 or len(data) < end + 3:
                return None
            body = bytes(data[1:end])
            told = bytes(data[end + 1 : end + 3])
            del data[: end + 3]
            if self._acknowledges:
                is_right = told.lower() == b"%02x" % (sum(body) & 0xFF)
                self._connection.sendall(b"+" if is_right else b"-")
                if not is_right:
                    continue
            return _unescaped(body)
        return None

    def _send(self, body: bytes) -> None:
        self._connection.sendall(b"$%b#%02x" % (body, sum(body) & 0xFF))

    def _stop_acknowledging(self) -> bytes:
        self._acknowledges = False
        return _OK

    # Requests

    def _answer(self, packet: bytes) -> bytes:
        """Return the answer to a packet; b"" for an unknown one."""
        if packet == bytes((_INTERRUPT,)):
            return self._stopped(_SIGINT)
        exact = self._exact.get(packet)
        try:
            with self._debugger.lock.observing():
                if exact is not None:
                    return exact()
                found = self._matched(packet)
        except MemoryFault:
            return _BAD_MEMORY
        except (KernelError, HardwareError, ValueError):
            return _ERROR
        if found is not None:
            return found
        return self._run(packet)

    def _matched(self, packet: bytes) -> bytes | None:
        """Return the answer to a packet with parameters; None if this method does not handle the packet.

        It does not handle unknown packets, and packets that run the guest; see _run().
        """
        if match := _MEMORY.fullmatch(packet):
            return self._memory(match)
        if match := _REGISTER.fullmatch(packet):
            return self._register(match)
        if match := _BREAKPOINT.fullmatch(packet):
            address = int(match[2], 16)
            if match[1] == b"Z":
                self._note_step(address)
            change = (
                self._debugger.breakpoints.add if match[1] == b"Z" else self._debugger.breakpoints.discard
            )
            change(address)
            return _OK
        if match := _FEATURES.fullmatch(packet):
            return self._features(int(match[1], 16), int(match[2], 16))
        if packet.startswith(b"qSupported"):
            return b"PacketSize=%x;QStartNoAckMode+;qXfer:features:read+;vContSupported+" % PACKET_LIMIT
        if packet.startswith(b"qThreadExtraInfo,"):
            return f"CPU {self._thread_number(packet[17:]) - 1}".encode().hex().encode()
        if packet.startswith((b"Hg", b"T")):
            number = self._thread_number(packet[2 if packet.startswith(b"H") else 1 :])
            if packet.startswith(b"H"):
                self._thread = number
            return _OK
        if packet.startswith(b"Hc"):
            return _OK
        if packet.startswith(b"D;"):
            return self._detach()
        if packet.startswith(b"G"):
            return self._set_registers(bytes.fromhex(packet[1:].decode("ascii", "replace")))
        return None

    def _note_step(self, address: int) -> None:
        """If gdb inserts a breakpoint at `address` in order to step over a probe, record this.

        gdb's next request to continue is then executed as a single step. gdb steps by breakpoints on RISC-V,
        and on any processor after it has skipped a breakpoint in memory by a write of ip. gdb puts its
        breakpoint at the next instruction, which is wrong if the probed instruction is a branch.
        gdb decodes c.ebreak as a jump to the address in register 0, so its breakpoint is then at 0.
        """
        size = self._debugger.breakpoint_size
        is_next = address == self._machine.regs.ip + size and (self._is_passed or self._steps_by_breakpoints)
        if size and (is_next or address == 0):
            self._is_step = True

    def _thread_number(self, text: bytes) -> int:
        """Return the thread number in the hexadecimal `text`; for 0 and -1, return that of the current CPU.

        Raises: ValueError (not a number, or no thread has it).
        """
        number = int(text, 16)
        if number in (0, -1):
            return self._machine.cpu + 1
        if number not in self._threads:
            raise ValueError(number)
        return number

    def _detach(self) -> bytes:
        self._is_done = True
        return _OK

    def _features(self, offset: int, size: int) -> bytes:
        text = (
            '<?xml version="1.0"?><!DOCTYPE target SYSTEM "gdb-target.dtd">'
            f"<target><architecture>{self._architecture}</architecture></target>"
        ).encode()
        part = text[offset : offset + size]
        return (b"m" if offset + size < len(text) else b"l") + part

    # Memory and registers

    def _memory(self, match: re.Match[bytes]) -> bytes:
        address = int(match[2], 16)
        size = int(match[3], 16)
        memory = self._machine.memory
        if match[1] == b"M":
            data = bytes.fromhex((match[4] or b"").decode())
            if len(data) != size:
                return _ERROR
            memory.write(address, data)
            return _OK
        if match[4] is not None or size > PACKET_LIMIT // 2 - 8 or address + size > _ADDRESSES:
            return _ERROR
        return memory.read(address, size).hex().encode()

    def _values(self) -> dict[str, int]:
        return self._machine.all_registers()[self._thread - 1]

    def _shown(self, values: dict[str, int], number: int) -> bytes:
        name, size = self._layout[number]
        value = values.get(name, 0) & (1 << 8 * size) - 1
        return value.to_bytes(size, "little").hex().encode()

    def _registers(self) -> bytes:
        values = self._values()
        return b"".join(self._shown(values, number) for number in range(len(self._layout)))

    def _register(self, match: re.Match[bytes]) -> bytes:
        number = int(match[2], 16)
        if number >= len(self._layout):
            return b"xxxxxxxx" if match[1] == b"p" and match[3] is None else _ERROR
        if match[1] == b"p":
            return _ERROR if match[3] is not None else self._shown(self._values(), number)
        data = bytes.fromhex((match[3] or b"").decode())
        if len(data) != self._layout[number][1]:
            return _ERROR
        return self._set(number, int.from_bytes(data, "little"))

    def _set_registers(self, data: bytes) -> bytes:
        at = 0
        values = []
        for number, (_, size) in enumerate(self._layout):
            if at + size > len(data):
                break
            values.append((number, int.from_bytes(data[at : at + size], "little")))
            at += size
        answers = [self._set(number, value) for number, value in values]
        return _ERROR if _ERROR in answers else _OK

    def _set(self, number: int, value: int) -> bytes:
        """Set register `number` of the layout; return the reply for gdb: OK, or an error.

        Only general registers of the current CPU except ip can be changed. The emulator cannot change ip in
        the middle of a run. Setting any other register to its present value succeeds, because gdb writes all
        registers at once.
        To continue after a breakpoint in memory, gdb first writes the next instruction's address to ip. At a
        probe's breakpoint, such a write succeeds without effect: the guest itself handles the breakpoint, and
        executes the probed instruction.
        """
        name, size = self._layout[number]
        now = self._values().get(name, 0) & (1 << 8 * size) - 1
        if value == now:
            return _OK
        size_at_ip = self._debugger.breakpoint_size
        if name == "ip" and size_at_ip and value == now + size_at_ip:
            self._is_passed = True
            return _OK
        is_general = name in self._machine.model.registers
        if not is_general or name == "ip" or self._thread != self._machine.cpu + 1:
            return _ERROR
        setattr(self._machine.regs, name, value)
        return _OK

    # Running

    def _run(self, packet: bytes) -> bytes:
        """Run the guest by the command in `packet`, and return the reply with the reason why it stopped.

        Return b"" if the packet is no command to run, and an error reply for an unknown action.
        """
        if packet.startswith(b"vCont;"):
            action = packet[6:7]
            # Each action but the last may name a thread; the CPUs run in turns, so the first one decides.
        elif packet[:1] in b"cs" and len(packet) == 1:
            action = packet
        elif packet[:1] in b"CS" and packet:
            action = packet[:1]
        else:
            return _NOTHING
        if action.lower() not in (b"c", b"s"):
            return _ERROR
        step = self._is_step or action.lower() == b"s"
        self._is_step = False
        self._is_passed = False
        self._debugger.resume(step=step)
        signal = _TRAP
        while not self._debugger.is_held:
            if self._closing.is_set():
                raise ConnectionError
            if signal == _SIGINT and self._debugger.interrupt():
                break
            # Only an interrupt is expected now; all else waits.
            found = self._next(_SLICE if signal == _TRAP else _SLICE / 10)
            if found == bytes((_INTERRUPT,)):
                signal = _SIGINT
                if self._debugger.interrupt():
                    break
        return self._stopped(signal)

    def _stopped(self, signal: int) -> bytes:
        number = self._machine.cpu + 1
        self._thread = number
        return b"T%02xthread:%x;" % (signal, number)


def _unescaped(body: bytes) -> bytes:
    """Return the body of a packet, in which the escape sequences of binary data are decoded."""
    if b"}" not in body:
        return body
    found = bytearray()
    escaped = False
    for byte in body:
        if escaped:
            found.append(byte ^ 0x20)
            escaped = False
        elif byte == ord("}"):
            escaped = True
        else:
            found.append(byte)
    return bytes(found)
