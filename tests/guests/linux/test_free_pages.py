"""The host gets back memory that the guest has freed, and the guest's other memory does not change."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from emulated_kernel.guests.common.host_processes import Fork
from emulated_kernel.guests.linux.guest.page_reporting import MANY, PageReporting
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from kprobefs.mount_options import KERNEL_KPROBES, KPROBES
from stress.linux.churn import COMPLAINT
from tests.guests.builtin.conftest import ScriptedWatch
from tests.guests.linux import debian_kernel
from tests.guests.linux.files import Files
from tests.guests.linux.parts import guest_of
from tests.guests.linux.probing import MODES, engine
from tests.guests.linux.rewind import PAGE, Rewind

SHELL, FIRST, CHILDREN = Client(4500, 0, 0), 5000, 100
TASK = 48 << 10
"""Minimum number of bytes of guest memory that a task takes."""


@pytest.fixture
def watch() -> ScriptedWatch:
    return ScriptedWatch(comms={SHELL.pid: "shell"})


@pytest.fixture(params=KPROBES)
def mount(request: pytest.FixtureRequest, watch: ScriptedWatch) -> Iterator[Mount]:
    if request.param == KERNEL_KPROBES:
        found = debian_kernel.mount(watch)
    else:
        found = probed_mount(engine(MODES["ftrace"]), watch, Owner(0, 0), is_tracefs=False)
    yield found
    found.close()


class Guest:
    """A mount, the files of a shell, and the amount of guest RAM that differs from the snapshot."""

    def __init__(self, mount: Mount, watch: ScriptedWatch) -> None:
        self.mount, self.watch, self.shell = mount, watch, Files(mount, SHELL)
        self._written = Rewind(guest_of(mount).tasks.machine.memory.ram, bool)

    def resident(self) -> int:
        """Return the number of bytes in pages of RAM that are no longer those of the snapshot."""
        return len(self._written.written()) * PAGE

    def put(self, client: Client, name: str, data: bytes) -> None:
        handle = self.mount.create(client, f"/scratch/{name}", 0o666, os.O_WRONLY | os.O_TRUNC)
        for at in range(0, len(data), 1 << 17):
            self.mount.write(client, handle, data[at : at + (1 << 17)], at)
        self.mount.release(handle)

    def get(self, name: str, size: int) -> bytes:
        handle = self.mount.open(SHELL, f"/scratch/{name}", os.O_RDONLY)
        try:
            pieces = (self.mount.read(SHELL, handle, 1 << 17, at) for at in range(0, size, 1 << 17))
            return b"".join(pieces)
        finally:
            self.mount.release(handle)

    def fork(self) -> None:
        """Fork children of the shell that live at the same time, and let every child write a file."""
        for number in range(CHILDREN):
            pid = FIRST + number
            self.watch.comms[pid] = "child"
            self.watch.pending_forks.append(Fork(pid, SHELL.pid, "child", 0, 0, alive=True))
            self.put(Client(pid, 0, 0), "common", b"%d" % pid)

    def end(self) -> None:
        """End the children.

        The kernel frees a part of their memory at once, and the rest after a grace period.
        """
        for pid in range(FIRST, FIRST + CHILDREN):
            self.watch.pending_exits.append(pid)
            del self.watch.comms[pid]
        self.shell.read("/scratch/common")
        guest_of(self.mount).tasks.idle(1_000_000)
        self.shell.read("/kprobes/list")


def test_tasks_that_ended(mount: Mount, watch: ScriptedWatch) -> None:
    """In each of three rounds of forks and exits, the host gets back memory of the ended tasks.

    Files keep their contents, and a probe counts all writes.
    """
    guest, kept = Guest(mount, watch), random.Random(1).randbytes(1 << 20)
    guest.put(SHELL, "kept", kept)
    guest.shell.write("/kprobe_events", "p:written vfs_write\n")
    guest.shell.write("/tracing/events/kprobes/enable", "1")
    before, left = guest.resident(), []
    for _ in range(3):
        guest.fork()
        most = guest.resident()
        assert most > before + CHILDREN * TASK
        guest.end()
        left.append(guest.resident())
        assert left[-1] < most - CHILDREN * TASK // 3
        assert guest.get("kept", len(kept)) == kept
        assert guest.shell.read("/scratch/common") == str(FIRST + CHILDREN - 1)
    assert left[-1] - left[0] < MANY * PAGE
    assert int(guest.shell.read("/kprobe_profile").split()[1]) >= 3 * CHILDREN
    assert not COMPLAINT.findall(guest.shell.read("/machine/dmesg"))


def test_a_file_that_is_removed(mount: Mount, watch: ScriptedWatch) -> None:
    guest, dice, size = Guest(mount, watch), random.Random(2), 12 << 20
    small = {f"small{number}": dice.randbytes(dice.randrange(20_000)) for number in range(30)}
    guest.put(SHELL, "warm", b"")
    before = guest.resident()
    for name, data in small.items():
        guest.put(SHELL, name, data)
        guest.put(SHELL, "large", dice.randbytes(size // len(small) * 2))
        guest.put(SHELL, f"part {name}", dice.randbytes(size // len(small)))
    assert guest.resident() > before + size
    for name in ("large", *(f"part {name}" for name in small)):
        mount.unlink(SHELL, f"/scratch/{name}")
    assert guest.resident() < before + size // 3
    assert {name: guest.get(name, len(data)) for name, data in small.items()} == small
    guest.put(SHELL, "large", b"\0" * size)
    assert guest.get("large", size) == b"\0" * size


def test_pages_that_the_kernel_wants_to_find_as_it_left_them() -> None:
    guest = debian_kernel.tasks()
    memory, facts = guest.machine.memory, guest.facts
    assert PageReporting(memory, guest.root, facts).high < len(memory.ram) // PAGE
    for symbols, offsets in (
        ({"init_on_free": facts.symbols["pid_max"]}, {}),
        ({"_page_poisoning_enabled": facts.symbols["pid_max"]}, {}),
        ({"node_data": 0}, {}),
        ({"vmemmap_base": facts.symbols["init_pid_ns"]}, {}),
        ({}, {"page.private": facts.offsets["page.private"] + 8}),
    ):
        other = replace(facts, symbols=facts.symbols | symbols, offsets=facts.offsets | offsets)
        written = Rewind(memory.ram, bool).written()
        PageReporting(memory, guest.root, other).look()
        assert Rewind(memory.ram, bool).written() == written
    guest.machine.close()
