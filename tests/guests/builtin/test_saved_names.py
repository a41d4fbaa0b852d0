"""Names that the guest saves for pids: repeated reads of a client save its name once, until the name may have
changed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.trace.text.cmdlines import PID_MAX_DEFAULT, SavedCmdlines
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.guests.builtin.conftest import FIRST_PID, ScriptedWatch

OTHER_PID = FIRST_PID + PID_MAX_DEFAULT
"""A pid that shares the entry of the saved names with FIRST_PID."""
CLIENT = Client(FIRST_PID, 0, 0)
OTHER = Client(OTHER_PID, 0, 0)
HITS = "/kprobes/stats/kprobes/seen/hits"


class Probed:
    """A kernel whose vfs_read is probed, and the number of times that a name was saved."""

    def __init__(self, kernel: Kernel, watch: ScriptedWatch, mount: Mount) -> None:
        self.kernel = kernel
        self.watch = watch
        self.mount = mount
        self.saves = 0

    def write(self, path: str, text: str) -> None:
        handle = self.mount.open(CLIENT, path, os.O_WRONLY)
        self.mount.write(CLIENT, handle, text.encode(), 0)
        self.mount.release(handle)

    def read(self, client: Client, path: str = HITS) -> str:
        handle = self.mount.open(client, path, os.O_RDONLY)
        try:
            return self.mount.read(client, handle, 4096, 0).decode()
        finally:
            self.mount.release(handle)

    def saves_of(self, client: Client, reads: int = 1) -> int:
        """Let a client read, and return how often the client's name was saved."""
        before = self.saves
        for _ in range(reads):
            self.read(client)
        return self.saves - before

    @property
    def names(self) -> set[str]:
        """Return the lines of saved_cmdlines, which init reads."""
        return set(self.read(Client(0, 0, 0), "/tracing/saved_cmdlines").splitlines())


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> Iterator[Probed]:
    watch = ScriptedWatch(comms={FIRST_PID: "client", OTHER_PID: "other"})
    with Kernel(MachineConfig(), watch) as kernel:
        mount = kernel.mount()
        probed = Probed(kernel, watch, mount)
        probed.write("/kprobe_events", "p:seen vfs_read\n")
        probed.write("/tracing/events/kprobes/seen/enable", "1")
        # The first hits are handled in Python.
        probed.saves_of(CLIENT, 3)
        save = SavedCmdlines.save

        def counted(names: SavedCmdlines, pid: int, comm: str) -> None:
            probed.saves += 1
            save(names, pid, comm)

        monkeypatch.setattr(SavedCmdlines, "save", counted)
        yield probed
        mount.close()


def test_reads_of_one_client_save_no_name_again(probed: Probed) -> None:
    hits = int(probed.read(CLIENT))
    assert probed.saves_of(CLIENT, 20) == 0
    assert int(probed.read(CLIENT)) == hits + 21
    assert f"{FIRST_PID} client" in probed.names
    # init has read the names.
    assert probed.saves_of(CLIENT, 2) == 1


def test_a_changed_name_is_saved(probed: Probed) -> None:
    probed.watch.comms[FIRST_PID] = "renamed"
    assert probed.saves_of(CLIENT, 2) == 1
    assert f"{FIRST_PID} renamed" in probed.names
    probed.read(CLIENT)
    kernel = probed.kernel
    task = kernel.guest.processes.known(FIRST_PID)
    at = task.addr + kernel.machine.image.abi["task_struct.comm"]
    kernel.machine.memory.write(at, b"by itself\0")
    assert probed.saves_of(CLIENT, 2) == 1
    assert f"{FIRST_PID} by itself" in probed.names


def test_a_lost_name_is_saved_again(probed: Probed) -> None:
    probed.kernel.trace.system.cmdlines.resize(300)
    assert probed.saves_of(CLIENT, 2) == 1
    assert f"{FIRST_PID} client" in probed.names
    for client, name, lost in ((OTHER, "other", "client"), (CLIENT, "client", "other")):
        assert probed.saves_of(client, 2) == 1
        found = probed.names
        assert f"{client.pid} {name}" in found
        assert not any(line.endswith(f" {lost}") for line in found)
