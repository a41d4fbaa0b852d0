"""Sight: what armed probes can read of a client's call, what the host reads of the client, and how often the
guest runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest

from emulated_kernel.guests.common.client_call import ClientCall, client_call
from emulated_kernel.guests.common.process_memory import ProcessMemory
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.sight import Sight
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.mount import Mount
from tests.guests.builtin.conftest import FIRST_PID, ScriptedWatch

CLIENT = Client(FIRST_PID, 0, 0)
HITS = "/kprobes/stats/kprobes/seen/hits"
PLAIN = "p:seen vfs_read\n"
OF_NUMBERS = "p:seen vfs_read count=$arg3\n"
OF_TEXT = "p:seen do_sys_openat2 name=+0($arg2):ustring\n"


class Read(ScriptedWatch):
    """A ProcessWatch that records which data of a client the host reads."""

    def __init__(self) -> None:
        super().__init__(comms={FIRST_PID: "client"})
        self.found: list[str] = []

    def call(self, pid: int, uid: int, instead: str | None = None) -> ClientCall | None:
        del pid, uid
        self.found.append("call" if instead is None else f"call without {instead or 'its path'}")
        return None

    def next_fd(self, pid: int) -> int | None:
        del pid
        self.found.append("descriptors")
        return 7

    def take(self) -> list[str]:
        found, self.found = self.found, []
        return found


def write(mount: Mount, path: str, text: str, flags: int = os.O_APPEND) -> None:
    handle = mount.open(CLIENT, path, os.O_WRONLY | flags)
    try:
        mount.write(CLIENT, handle, text.encode(), 0)
    finally:
        mount.release(handle)


def armed(mount: Mount, definitions: str) -> None:
    write(mount, "/kprobe_events", definitions)
    write(mount, "/tracing/events/kprobes/enable", "1")


@pytest.mark.parametrize(
    ("definitions", "sight"),
    [
        (PLAIN, Sight.NOTHING),
        ("p:seen vfs_read who=$comm\n", Sight.NOTHING),
        ("p:seen vfs_read+5\n", Sight.NOTHING),
        (OF_NUMBERS, Sight.REGISTERS),
        ("p:seen vfs_read at=%ip\n", Sight.REGISTERS),
        (OF_TEXT, Sight.MEMORY),
        ("p:seen vfs_read word=$stack1\n", Sight.MEMORY),
        ("p:seen vfs_read constant=@jiffies\n", Sight.MEMORY),
        ("r:seen vfs_read\n", Sight.MEMORY),
        (PLAIN + "p:more vfs_write\n", Sight.NOTHING),
        (PLAIN + "p:more vfs_write count=$arg3\n", Sight.REGISTERS),
        (PLAIN + "p:more vfs_read text=+0($arg2):ustring\n", Sight.MEMORY),
        # Hits of this function depend on the length of a path.
        ("p:seen strncpy_from_user\n", Sight.MEMORY),
        ("p:seen do_strncpy_from_user+8\n", Sight.MEMORY),
    ],
)
def test_what_events_see(definitions: str, sight: Sight) -> None:
    with Kernel() as kernel:
        mount = kernel.mount()
        armed(mount, definitions)
        assert kernel.guest.sight() is sight
        mount.close()


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("/tracing/events/syscalls/sys_enter_openat/enable", "1"),
        ("/tracing/current_tracer", "function"),
        ("/tracing/current_tracer", "function_graph"),
        ("/tracing/events/kprobes/seen/trigger", "hist:keys=common_pid"),
    ],
)
def test_whatever_else_sees_a_call_may_see_everything(path: str, text: str) -> None:
    with Kernel() as kernel:
        mount = kernel.mount()
        armed(mount, PLAIN)
        assert kernel.guest.sight() is Sight.NOTHING
        write(mount, path, text)
        assert kernel.guest.sight() is Sight.MEMORY
        mount.close()


@pytest.mark.parametrize(
    "kprobe",
    [
        lambda: Kprobe(symbol_name="vfs_read", pre_handler=lambda _kprobe, _regs: 0),
        lambda: Kprobe(symbol_name="vfs_read", offset=5, code="nop"),
    ],
    ids=["python", "assembly"],
)
def test_handlers_of_programs_may_see_everything(kprobe: Callable[[], Kprobe]) -> None:
    with Kernel() as kernel:
        mount = kernel.mount()
        armed(mount, PLAIN)
        found = kprobe()
        kernel.register_kprobes([found])
        assert kernel.guest.sight() is Sight.MEMORY
        kernel.unregister_kprobes([found])
        assert kernel.guest.sight() is Sight.NOTHING
        mount.close()


def test_optimized_probes_see_no_more() -> None:
    with Kernel() as kernel:
        mount = kernel.mount()
        armed(mount, "p:seen ksys_read+5\n")
        kernel.wait_for_kprobe_optimizer()
        # A breakpoint is one byte.
        assert len(kernel.machine.text.ledger) > 1
        assert kernel.guest.sight() is Sight.NOTHING
        mount.close()


@pytest.mark.parametrize(
    ("definitions", "lookup", "missing", "opened", "read"),
    [
        (PLAIN, [], [], [], []),
        (OF_NUMBERS, [], [], [], ["call"]),
        ("p:seen vfs_open\n", ["call without its path"], ["call"], [f"call without {HITS}"], []),
        ("p:seen vfs_open flags=$arg2\n", ["call without its path"], ["call"], [f"call without {HITS}"], []),
        (OF_TEXT, ["call without its path"], ["call"], ["call"], []),
        (f"{OF_TEXT}p:more vfs_read\n", ["call without its path"], ["call"], ["call"], ["call"]),
    ],
)
def test_what_is_read_of_a_client(
    definitions: str, lookup: list[str], missing: list[str], opened: list[str], read: list[str]
) -> None:
    """The host reads only data of a client that a probe can notice.

    No system call on names executes vfs_read, and no read executes vfs_open.
    """
    watch = Read()
    with Kernel(MachineConfig(), watch) as kernel:
        mount = kernel.mount()
        armed(mount, definitions)
        watch.take()
        mount.getattr(HITS, lambda: CLIENT)
        assert watch.take() == lookup
        with pytest.raises(OSError, match="Errno 2"):
            mount.getattr("/kprobes/none", lambda: CLIENT)
        assert watch.take() == missing
        handle = mount.open(CLIENT, HITS, os.O_RDONLY)
        assert watch.take() == opened
        mount.read(CLIENT, handle, 4096, 0)
        assert watch.take() == read
        mount.release(handle)
        assert watch.take() == []
        mount.close()


@pytest.mark.parametrize(
    ("definitions", "opened", "read", "closed"),
    [
        (PLAIN, 0, 2, 0),
        (OF_NUMBERS, 0, 4, 1),
        ("p:seen vfs_open\n", 2, 0, 1),
        (f"{OF_TEXT}p:more vfs_read\n", 2, 2, 1),
        ("p:seen vfs_write\n", 0, 0, 0),
    ],
)
def test_how_often_the_guest_runs(
    definitions: str, opened: int, read: int, closed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call that a probe can notice runs the guest up to the control file, and again to the end of the call.

    Calls that no probe can notice do not run the guest.
    """
    with Kernel(MachineConfig(), Read()) as kernel:
        mount = kernel.mount()
        armed(mount, definitions)
        engine = kernel.machine.hooks.engine
        start = engine.start
        runs = 0

        def counted(address: int) -> int:
            nonlocal runs
            runs += 1
            return start(address)

        monkeypatch.setattr(engine, "start", counted)

        def runs_of(request: Callable[[], object]) -> int:
            nonlocal runs
            runs = 0
            request()
            return runs

        for _ in range(2):
            handle = mount.open(CLIENT, HITS, os.O_RDONLY)
            mount.read(CLIENT, handle, 4096, 0)
            mount.release(handle)
        handles: list[int] = []
        assert runs_of(lambda: mount.getattr(HITS, lambda: CLIENT)) == 0
        assert runs_of(lambda: handles.append(mount.open(CLIENT, HITS, os.O_RDONLY))) == opened
        assert runs_of(lambda: mount.read(CLIENT, handles[0], 4096, 0)) == read
        assert runs_of(lambda: mount.release(handles[0])) == closed
        mount.close()


def test_a_path_that_nobody_sees_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """If no probe can see the path in a client's call, the path is not read from the client: the path of the
    request is used.

    The path is read all the same if the call may create the file. It is also read for O_DIRECTORY, with which
    the call may end at the lookup of the file.
    """
    memory = ProcessMemory()
    monkeypatch.setattr(memory, "read", lambda *_: [b"typed"])
    calls = {
        os.O_RDONLY: b"given",
        os.O_WRONLY | os.O_TRUNC: b"given",
        os.O_WRONLY | os.O_CREAT: b"typed",
        os.O_RDONLY | os.O_DIRECTORY: b"typed",
    }
    module = "emulated_kernel.guests.common.client_call"
    for flags, path in calls.items():
        line = f"257 0xffffff9c 0x1000 {flags:#x} 0x0 0x0 0x0 0x0 0x0".encode()
        monkeypatch.setattr(f"{module}._waiting_in", lambda _pid, line=line: line.split())
        monkeypatch.setattr(f"{module}._NAMES", {257: "openat"})
        found = client_call(1, memory, "given")
        assert found is not None
        assert (found.data[1], found.flags, found.is_hidden) == (path, flags, False)
        found = client_call(1, memory, "")
        assert found is not None
        assert found.is_hidden == (path == b"given")
    memory.close()
