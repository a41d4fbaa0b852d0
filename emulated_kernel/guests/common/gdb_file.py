"""machine/gdb: a file with the path of a socket for GDB's remote protocol.

The socket exists from the first read of the file on.
"""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.machine.debugger import DebuggedMachine, Debugger
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.vfs.core.seq_file import SeqFile, single

TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.guests.common.gdb_server import GdbServer


def gdb_file(machine: DebuggedMachine, lock: ControlLock) -> SeqFile:
    """Return the file machine/gdb of a machine. Reading it starts a server for gdb.

    The content of the file is the path of the server's socket. `lock`: the control lock of the machine.
    """
    return SeqFile(0o400, single(gdb_path(machine, lock)))


def gdb_path(machine: DebuggedMachine, lock: ControlLock) -> Callable[[], str]:
    """Return a function that returns the path of the gdb server's socket, followed by a newline.

    The first call of the function starts the server. The server is closed before the machine is freed.
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
