"""Helpers that run a daemon with --state without FUSE, and that read the state which a daemon has left."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from kprobefs.daemon.reboot import RebootableKernel
from kprobefs.daemon.state import journal
from kprobefs.daemon.state.saved_state import SavedState
from kprobefs.daemon.state.state_directory import StateDirectory

CONFIG = MachineConfig(cpus=2)
CLIENT = Client(os.getpid(), 0, 0)
DEFINITIONS = """\
p:reads vfs_read count=$arg3 from=+0($arg2):u8
p:writes vfs_write
"""


class Run:
    """A daemon with --state, without FUSE."""

    def __init__(self, directory: Path, config: MachineConfig = CONFIG) -> None:
        self.directory = StateDirectory(str(directory))
        self.living = RebootableKernel(
            config, RootLayout.FULL, Owner(0, 0), state=SavedState(self.directory, "")
        )
        self.mount, self.kernel = self.living.mount, self.living._kernel

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        return self.mount.open(CLIENT, path, flags)

    def write(self, path: str, text: str, flags: int = os.O_WRONLY) -> None:
        handle = self.open(path, flags)
        try:
            self.mount.write(CLIENT, handle, text.encode(), 0)
        finally:
            self.mount.release(handle)

    def read(self, path: str) -> str:
        handle, data = self.open(path), b""
        while part := self.mount.read(CLIENT, handle, 1 << 16, len(data)):
            data += part
        self.mount.release(handle)
        return data.decode("utf-8", "surrogateescape")

    def records(self, path: str) -> list[str]:
        return [line for line in self.read(f"{path}/trace").splitlines() if not line.startswith("#")]

    def hit(self, count: int) -> None:
        file = self.mount.create(CLIENT, "/scratch/x", 0o600, os.O_RDWR | os.O_CREAT)
        for size in range(1, count + 1):
            self.mount.read(CLIENT, file, size, 0)
        self.mount.release(file)

    def kept(self) -> str:
        """Return the part of machine/state that says whether a state is kept."""
        return self.read("/machine/state").splitlines()[1]

    def found(self) -> str:
        return self.read("/machine/state").splitlines()[2].removeprefix("last ")

    def troubles(self) -> list[str]:
        """Return the errors in the previous state that machine/state reports."""
        return [line.removeprefix("trouble ") for line in self.read("/machine/state").splitlines()[3:]]

    def die(self) -> None:
        """End the daemon as kill -9 does, without further writes to the state."""
        self.mount.watch(None)
        if self.living._state is not None and self.living._state._timer is not None:
            self.living._state._timer.cancel()
        self._close()

    def _close(self) -> None:
        self.directory.close()
        self.living._kernel.close()
        self.living._processes.close()

    def end(self) -> None:
        self.mount.close()
        self._close()


def own(definitions: str) -> list[str]:
    """Return the lines of `definitions`, except those for records of an earlier kernel."""
    return [line for line in definitions.splitlines() if not line.startswith("instances/last")]


def head_of(directory: Path) -> dict[str, object]:
    return journal.read(directory / "journal").entries[0]


def records_of(directory: Path) -> Path:
    return directory / str(head_of(directory)["records"])


def rewrite(directory: Path, change: Callable[[list[journal.Entry]], None]) -> None:
    """Let `change` edit the list of the journal's entries, and write the edited entries as a valid
    journal.
    """
    entries = journal.read(directory / "journal").entries
    change(entries)
    journal.Journal(directory / "journal", b"".join(map(journal.encoded, entries))).close()
