"""machine/: the emulated computer, as /proc would show it, and a way to call its functions."""

from __future__ import annotations

import errno
from collections.abc import Callable

from emulated_kernel.errors import KernelError
from emulated_kernel.vfs.mount import Client
from emulated_kernel.vfs.node import Directory, Owner
from emulated_kernel.vfs.ports import MachinePort
from emulated_kernel.vfs.seq import (
    CommandFile,
    Execute,
    GuestCommandFile,
    PerClientCommandFile,
    PerClientFile,
    Records,
    SeqFile,
    listing,
    single,
)


def machine_directory(machine: MachinePort, owner: Owner) -> Directory:
    """The files of machine/; `owner` may see addresses."""

    def kallsyms_for(client: Client) -> Records:
        hidden = not owner.is_privileged(client)
        return listing(lambda: machine.kallsyms(hidden))

    def modules_for(client: Client) -> Records:
        hidden = not owner.is_privileged(client)
        return listing(lambda: machine.modules(hidden))

    calls = _Calls(machine)
    return Directory(
        0o755,
        {
            "version": SeqFile(0o444, single(lambda: f"{machine.version()}\n")),
            "kallsyms": PerClientFile(0o444, kallsyms_for),
            "dmesg": SeqFile(0o400, listing(machine.dmesg)),
            "modules": PerClientCommandFile(0o644, modules_for, _each_line(machine.command_module)),
            "tasks": SeqFile(0o444, listing(machine.tasks)),
            "cpus": SeqFile(0o444, listing(machine.cpus)),
            "meminfo": SeqFile(0o444, listing(machine.meminfo)),
            "clock": CommandFile(0o644, single(machine.clock), _each_line(machine.command_clock)),
            "load": GuestCommandFile(0o644, listing(machine.loads), _each_line(machine.command_load)),
            "call": GuestCommandFile(0o600, single(lambda: calls.result), calls.execute),
        },
    )


def _each_line(command: Callable[[str], None]) -> Execute:
    """Execute each line of a write; those before one that fails are done."""

    def execute(data: bytes) -> int:
        for line in _lines(data):
            command(line)
        return len(data)

    return execute


class _Calls:
    """What `call` remembers: the results of the last write, and why it failed."""

    def __init__(self, machine: MachinePort) -> None:
        self._machine = machine
        self.result = ""

    def execute(self, data: bytes) -> int:
        """Call a function for each line; the results can be read afterwards.

        Raises: KernelError of the first call that fails; the calls before it were made.
        """
        lines = _lines(data)
        self.result = ""
        for line in lines:
            try:
                self.result += f"{self._machine.call(line)}\n"
            except KernelError as error:
                self.result += f"{line.split(maxsplit=1)[0]}: {error.strerror}\n"
                raise
        return len(data)


def _lines(data: bytes) -> list[str]:
    """The lines of a write that aren't empty. Raises: KernelError EINVAL."""
    try:
        lines = [line.strip() for line in data.decode("ascii").split("\n")]
    except UnicodeDecodeError as error:
        raise KernelError(errno.EINVAL, "not ASCII") from error
    return [line for line in lines if line]
