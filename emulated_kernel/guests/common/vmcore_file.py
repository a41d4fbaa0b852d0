"""machine/vmcore: an ELF core with the guest's memory and registers at the time of the open."""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Callable, Iterator
from typing import IO, Protocol

from emulated_kernel.guests.common.spill_file import open_tmpfile
from emulated_kernel.machine.core_dump import RAM_OFFSET, core_headers
from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.memory.guest_memory import MappedRange
from emulated_kernel.machine.memory.sparse import copy_data, write_all
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client, Stat
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.core.open_file import File, OpenFile

MAX_OPEN = 4
"""Maximum number of cores that are open at a time. Each has a temporary file."""
MAX_BYTES = 1 << 30
"""Maximum size in bytes of the memory in all open cores, without zeros. A single core may be larger."""


class CoreMemory(Protocol):
    """Interface of the guest memory that is written to a core; GuestMemory describes the methods."""

    @property
    def ram(self) -> mmap.mmap: ...

    def data_ranges(self) -> Iterator[tuple[int, int]]: ...

    def mapped_ranges(self) -> Iterator[MappedRange]: ...


class CoreSource(Protocol):
    """Interface of a stopped machine that is written to a core; ProbedMachine describes the methods."""

    @property
    def model(self) -> CpuModel: ...

    @property
    def memory(self) -> CoreMemory: ...

    def all_registers(self) -> list[dict[str, int]]: ...

    def original_text(self) -> Iterator[tuple[int, bytes]]: ...


def write_core(machine: CoreSource, vmcoreinfo: bytes) -> IO[bytes]:
    """Return an unnamed file with an ELF core of a stopped machine.

    Zeros of the guest's memory are holes. Raises: KernelError ENOSPC (no directory has enough space), OSError
    (the file cannot be written).
    """
    memory = machine.memory
    used = [*memory.data_ranges()]
    headers = core_headers(
        machine.model, memory.mapped_ranges(), machine.all_registers(), vmcoreinfo, machine.original_text()
    )

    def write(file: IO[bytes]) -> None:
        with memoryview(memory.ram) as ram:
            copy_data(ram, used, file, RAM_OFFSET)
        write_all(file.fileno(), headers, 0)

    return open_tmpfile(write, sum(size for _, size in used), RAM_OFFSET + len(memory.ram))


class VmcoreFile(File):
    """The node machine/vmcore.

    Its size is the size of the guest's physical memory plus the headers' space.
    """

    def __init__(self, machine: ProbedMachine, vmcoreinfo: Callable[[], bytes]) -> None:
        """Create the node. `vmcoreinfo` returns the text of the note VMCOREINFO; b"" means no such note."""
        super().__init__(0o400)
        self.machine = machine
        self.vmcoreinfo = vmcoreinfo
        self.open_cores = 0
        self.open_bytes = 0
        """Size in bytes of the memory in the open cores, without zeros."""

    def stat(self, owner: Owner) -> Stat:
        """Return the attributes of the node.

        The size is not 0, because debuggers refuse a core whose size is 0.
        """
        return super().stat(owner)._replace(size=RAM_OFFSET + len(self.machine.memory.ram))


class OpenVmcore(OpenFile):
    """An open core, which keeps the guest's state at the time of the open.

    Raises: KernelError EBUSY (MAX_OPEN cores are open, or this core and other open ones together would exceed
    MAX_BYTES), ENOSPC (no directory has enough space), OSError (the temporary file cannot be written).
    """

    node: VmcoreFile

    def __init__(self, node: VmcoreFile, flags: int, client: Client) -> None:
        super().__init__(node, flags, client)
        if node.open_cores >= MAX_OPEN:
            raise KernelError(errno.EBUSY, f"vmcore: {MAX_OPEN} are open; close one first")
        self._size = sum(size for _, size in node.machine.memory.data_ranges())
        if node.open_cores and node.open_bytes + self._size > MAX_BYTES:
            raise KernelError(errno.EBUSY, "vmcore: the open ones have 1 GiB; close one first")
        self._core = write_core(node.machine, node.vmcoreinfo())
        node.open_cores += 1
        node.open_bytes += self._size

    def _read(self, size: int, position: int) -> bytes:
        return os.pread(self._core.fileno(), size, position)

    def goes_on_from(self, other: OpenFile) -> None:
        """Take over the core of `other`, so that the client still reads the core that it has opened.

        `other`: the client's open file before a reboot, which is replaced by this open file.
        """
        super().goes_on_from(other)
        if isinstance(other, OpenVmcore):
            self._core, other._core = other._core, self._core
            other._core.close()

    def release(self) -> None:
        """Free the temporary file."""
        self.node.open_cores -= 1
        self.node.open_bytes -= self._size
        self._core.close()


VmcoreFile.opened_as = OpenVmcore
