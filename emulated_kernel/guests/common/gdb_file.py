"""machine/gdb: the path of a socket for GDB's remote protocol, which exists from the first read on."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.machine.debugger import DebuggedMachine, Debugger
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.vfs.core.seq_file import SeqFile, single

TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.guests.common.gdb_server import GdbServer


def gdb_file(machine: DebuggedMachine, lock: ControlLock) -> SeqFile:
    """Return the file machine/gdb for a machine."""
    return SeqFile(0o400, single(gdb_path(machine, lock)))


def gdb_path(machine: DebuggedMachine, lock: ControlLock) -> Callable[[], str]:
    """Return a function that returns the path of a socket as a line. Its first call starts the server.

    The end of the machine also ends the debugger's session.
    """
    servers: list[GdbServer] = []

    def path() -> str:
        if not servers:
            # Few mounts are debugged, so that the server is imported when it is needed.
            from emulated_kernel.guests.common.gdb_server import GdbServer

            server = GdbServer(Debugger(machine, lock))
            lock.end_debugging = server.close
            machine.at_close(server.close)
            servers.append(server)
        return f"{servers[0].path}\n"

    return path
