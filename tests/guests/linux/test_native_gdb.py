"""machine/gdb of a distribution's kernel with its own kprobes: its breakpoints, detours and registers."""

from __future__ import annotations

import errno
import os

import pytest

from emulated_kernel.guests.common.host_processes import ProcessWatch
from emulated_kernel.guests.linux.mounts.native_core import NativeCore
from emulated_kernel.guests.linux.mounts.native_mount import native_mount
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux import debian_kernel
from tests.kernel.gdb_client import GdbClient, Request
from tests.oracle.inside.mount_files import read, write

ROOT = Client(os.getpid(), 0, 0)
ROUNDS = 500
"""Maximum number of reads until the kernel's optimizer has written the jump."""
STEPS = 5000
"""Maximum number of instructions in a detour and its handler."""


class Debugged:
    """A kernel, the path of its debugger's socket, and a file whose read calls vfs_read."""

    def __init__(self) -> None:
        tasks = debian_kernel.tasks()
        self.mount: Mount = native_mount(tasks, ProcessWatch(), Owner(0, 0), is_tracefs=False)
        self.memory = NativeCore(tasks)
        self.handle = self.mount.create(ROOT, "/scratch/file", 0o644, os.O_RDWR)
        self.mount.write(ROOT, self.handle, b"hello", 0)
        symbols = (line.split() for line in read(self.mount, "/machine/kallsyms").splitlines())
        self.vfs_read = next(int(words[0], 16) for words in symbols if words[2] == "vfs_read")
        self.path = read(self.mount, "/machine/gdb").strip()

    def read(self) -> bytes:
        return self.mount.read(ROOT, self.handle, 16, 0)

    def instructions(self) -> list[int]:
        """Break in vfs_read, and return the addresses of the instructions that a read executes first."""
        client, request = self.stopped_at(self.vfs_read)
        found = [self.vfs_read, *(step(client) for _ in range(12))]
        client.close()
        assert request.done() == b"hello"
        return found

    def stopped_at(self, address: int) -> tuple[GdbClient, Request]:
        """Return a debugger that holds the guest before the instruction at `address`, and the request that
        waits.
        """
        client = GdbClient(self.path)
        assert client.ask(f"Z0,{address:x},1") == "OK"
        client.send("c")
        request = Request(self.read)
        assert client.answer() == "T05thread:1;"
        assert client.ip == address
        return client, request

    def probe(self, address: int) -> None:
        offset = address - self.vfs_read
        assert not write(self.mount, "/tracing/kprobe_events", f"p:here vfs_read+{offset}\n")
        assert not write(self.mount, "/tracing/events/kprobes/here/enable", "1")

    def unprobe(self) -> None:
        assert not write(self.mount, "/tracing/events/kprobes/here/enable", "0")
        assert not write(self.mount, "/tracing/kprobe_events", "-:here\n")


def step(client: GdbClient) -> int:
    client.send("s")
    assert client.answer() == "T05thread:1;"
    return client.ip


@pytest.fixture(scope="module")
def debugged() -> Debugged:
    return Debugged()


def test_a_step_passes_a_hit_of_the_kernels_breakpoint(debugged: Debugged) -> None:
    """A debugger's step over a kprobe of the kernel ends at the next instruction, also if this moves the
    stack pointer.
    """
    assert not write(debugged.mount, "/sysctl/debug/kprobes-optimization", "0")
    places = debugged.instructions()
    for number in (1, 7):
        debugged.probe(places[number])
        client, request = debugged.stopped_at(places[number])
        assert client.memory(places[number], 1) == b"\xcc"
        assert [step(client), step(client)] == places[number + 1 : number + 3]
        client.close()
        assert request.done() == b"hello"
        debugged.unprobe()
    assert not write(debugged.mount, "/sysctl/debug/kprobes-optimization", "1")


def test_a_step_enters_the_kernels_detour(debugged: Debugged) -> None:
    place = debugged.instructions()[1]
    debugged.probe(place)
    rounds = 0
    while debugged.memory.read(place, 1) != b"\xe9" and rounds < ROUNDS:
        rounds += 1
        assert debugged.read() == b"hello"
    jump = debugged.memory.read(place, 5)
    detour = place + 5 + int.from_bytes(jump[1:], "little", signed=True)
    client, request = debugged.stopped_at(place)
    visited = [step(client)]
    while visited[-1] not in range(place, place + 20) and len(visited) < STEPS:
        visited.append(step(client))
    client.close()
    assert request.done() == b"hello"
    assert (jump[0], visited[0]) == (0xE9, detour)
    assert visited[-1] >= place + 5
    debugged.unprobe()


def test_the_files_that_need_no_guest_are_served(debugged: Debugged) -> None:
    client, request = debugged.stopped_at(debugged.vfs_read)
    assert debugged.mount.is_debugged
    assert "which --cpu replaces" in read(debugged.mount, "/machine/cpu")
    assert read(debugged.mount, "/machine/gdb").strip() == debugged.path
    core = debugged.mount.open(ROOT, "/machine/vmcore", os.O_RDONLY)
    assert debugged.mount.read(ROOT, core, 4, 0) == b"\x7fELF"
    debugged.mount.release(core)
    other = Request(lambda: read(debugged.mount, "/machine/version"))
    assert other.waits
    # Text and unmapped addresses are not written.
    assert client.ask(f"M{debugged.vfs_read:x},1:cc") == "E0e"
    assert client.ask("m0,1") == "E0e"
    assert client.ask("qfThreadInfo") == "m1"
    client.close()
    assert request.done() == b"hello"
    assert str(other.done()).startswith("Linux version")


def test_known_names_need_no_guest(debugged: Debugged) -> None:
    """While the guest is held, attributes come from its dentries. Only an unknown name waits."""
    names = ("/", "/machine", "/tracing", "/scratch", "/scratch/file")
    before = [debugged.mount.getattr(name) for name in names]
    client, request = debugged.stopped_at(debugged.vfs_read)
    held = Request(lambda: [debugged.mount.getattr(name) for name in names])
    unknown = Request(lambda: debugged.mount.getattr("/scratch/nothing"))
    assert held.done() == before
    assert unknown.waits
    client.close()
    assert request.done() == b"hello"
    with pytest.raises(KernelError) as refused:
        unknown.done()
    assert refused.value.errno == errno.ENOENT


def test_only_the_owner_reads_the_path(debugged: Debugged) -> None:
    with pytest.raises(KernelError):
        debugged.mount.open(Client(os.getpid(), 1234, 1234), "/machine/gdb", os.O_RDONLY)
