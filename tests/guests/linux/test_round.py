"""open, read and close in scratch/: their costs below FUSE, and the order of deferred closes."""

from __future__ import annotations

import ctypes
import os
import re
import struct
import sys
from collections.abc import Iterator
from types import FrameType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulated_kernel.guests.common.host_processes import Fork, ProcessWatch
from emulated_kernel.guests.linux.mounts.probed_mount import probed_mount
from emulated_kernel.guests.linux.pc.linux_cpu import SYSCALL_SIZE
from emulated_kernel.guests.linux.pc.pc_machine import PcMachine
from emulated_kernel.guests.linux.pc.riscv_machine import RiscvMachine
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.machine.native.host_code import routine_address
from emulated_kernel.machine.unicorn_engine import Engine
from emulated_kernel.util.errors import KernelError
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from tests.guests.linux import debian_kernel
from tests.guests.linux.files import Files
from tests.guests.linux.parts import file, guest_of

SHELL, OTHER = Client(4001, 0, 0), Client(4002, 0, 0)
FILE = "/scratch/file"
KERNELS = (
    (debian_kernel.META, debian_kernel.SUITE),
    ("linux-image-cloud-arm64", "trixie"),
    ("linux-image-riscv64", "trixie"),
)
CALLS, STARTS, CALLBACKS = 107, 2, 1
"""Limits of a round: Python's function calls, runs of the emulator, and calls from it to Python.

Lower the limits when a round takes less.
"""


class Host(ProcessWatch):
    """A watch of two processes. The first process can get another name and can fork."""

    def __init__(self) -> None:
        self.name = "sh"
        self.forked: list[Fork] = []

    def comm(self, pid: int) -> str | None:
        return self.name if pid == SHELL.pid else "cat"

    def has_events(self) -> bool:
        return bool(self.forked)

    def forks(self) -> list[Fork]:
        found, self.forked = self.forked, []
        return found


@pytest.fixture(scope="module", params=KERNELS, ids=["x86_64", "arm64", "riscv64"])
def mount(request: pytest.FixtureRequest) -> Iterator[Mount]:
    meta, suite = request.param
    found = probed_mount(
        LinuxEngine(*debian_kernel.with_kernel(meta, suite)), ProcessWatch(), Owner(0, 0), is_tracefs=False
    )
    found.release(found.create(SHELL, FILE, 0o644, os.O_WRONLY))
    yield found
    found.close()


def opened_and_read(mount: Mount, client: Client = SHELL) -> None:
    """Make the requests of open(FILE), read() and close(), without the lookup, as if the host's kernel
    already knew the name.
    """
    handle = mount.open(client, FILE, os.O_RDONLY)
    mount.read(client, handle, 4096, 0)
    mount.release(handle)


def test_how_much_it_takes(mount: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    """A round stays within limits for Python's function calls, runs of the emulator, and callbacks.

    The cheaper of two rounds is compared, because one round may contain a tick of the guest.
    """
    starts = 0
    engine = guest_of(mount).tasks.machine.engine
    start = engine.start

    def counted(address: int) -> int:
        nonlocal starts
        starts += 1
        return start(address)

    monkeypatch.setattr(engine, "start", counted)
    found = []
    for _ in range(2):
        opened_and_read(mount)
        starts, calls, callbacks = 0, 0, 0

        def profile(frame: FrameType, event: str, _argument: object) -> None:
            nonlocal calls, callbacks
            if event == "call" and "/emulated_kernel/" in frame.f_code.co_filename:
                calls += 1
                callbacks += frame.f_back is not None and frame.f_back.f_code is Engine.start.__code__

        sys.setprofile(profile)
        try:
            opened_and_read(mount)
        finally:
            sys.setprofile(None)
        found.append((calls, starts, callbacks))
    calls, starts, callbacks = min(found)
    assert calls > CALLS / 2
    assert starts == STARTS
    if guest_of(mount).tasks.machine.hooks.is_native:
        assert calls <= CALLS
        assert callbacks == CALLBACKS


def test_the_emulator_keeps_its_translations(mount: Mount) -> None:
    """A round on riscv64 changes SUM four times, and the emulator keeps its translations each time."""
    machine = guest_of(mount).tasks.machine
    if not isinstance(machine, RiscvMachine) or not machine.hooks.is_native:
        return
    opened_and_read(mount)
    before = machine.user_access.spared
    opened_and_read(mount)
    assert machine.user_access.spared - before == 4


ENTER = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_uint32, ctypes.c_void_p)


@given(words=st.lists(st.integers(0, 2**64 - 1), min_size=12, max_size=12), flags=st.integers(0, 2**12 - 1))
def test_the_host_enters_the_kernel_as_python_does(mount: Mount, words: list[int], flags: int) -> None:
    """The host's routine enters the kernel with the same CPU state as Python, for any registers and flags."""
    machine = guest_of(mount).tasks.machine
    routine = routine_address("enter")
    if routine is None:
        pytest.skip("there is no routine for this kind of host")
    engine, regs, call = machine.engine, machine.regs, machine.abi.stub.syscall
    opened_and_read(mount)
    at_stub = engine.saved_context()
    for name, word in zip((*machine.abi.call, *machine.abi.kept), words, strict=False):
        regs.set(name, word)
    if isinstance(machine, PcMachine):
        native, reported_ahead, advanced_later = machine._syscalls, 0, SYSCALL_SIZE
        direction = -1 if flags & 2 else 1
        struct.pack_into(
            "QQQQIi", machine.cpu._flags, 0, flags & 0x300 | 2, 3, flags & 0x8D5, 4, 1, direction
        )
    else:
        native, reported_ahead, advanced_later = machine.hooks.words, 4, 0
    before = engine.saved_context()
    machine.cpu.syscall(call)
    regs.ip -= advanced_later
    by_python = engine.saved_context()
    engine.restore_context(before)
    regs.ip = call + reported_ahead
    ENTER(routine)(None, native.entry_vector, ctypes.addressof(native))
    by_host = engine.saved_context()
    engine.restore_context(at_stub)
    assert by_host == by_python
    assert by_host != before


def events(shell: Files) -> list[tuple[str, str]]:
    """Return (comm, event) for each open and close since the trace was emptied, without opens of
    the trace.
    """
    text = shell.read("/tracing/trace")
    found = re.findall(r": (closed|opened): .* comm=\"(.*?)\"(?: name=\"(.*)\")?$", text, re.MULTILINE)
    return [(comm, event) for event, comm, name in found if name != "/tracing/trace"][1:]


@pytest.fixture
def host() -> Host:
    return Host()


@pytest.fixture
def traced(host: Host) -> Iterator[Files]:
    mount = debian_kernel.mount(host)
    shell = Files(mount, SHELL)
    mount.release(mount.create(SHELL, FILE, 0o644, os.O_WRONLY))
    opened_and_read(mount, OTHER)
    define(shell, "do_sys_openat2", "name=+0($arg2):ustring")
    yield shell
    mount.close()


def define(shell: Files, function: str, *arguments: str) -> None:
    """Define and enable events with the task's name at close(2) and at `function`, and empty the trace."""
    shell.write("/tracing/events/enable", "0")
    opened = " ".join((f"p:opened {function} comm=$comm", *arguments))
    shell.write(
        "/kprobe_events", f"p:closed __x64_sys_close comm=$comm\n{opened}\n", os.O_WRONLY | os.O_TRUNC
    )
    shell.write("/tracing/events/kprobes/enable", "1")
    shell.write("/tracing/trace", "", os.O_WRONLY | os.O_TRUNC)


def test_each_close_stands_where_it_was_made(traced: Files, host: Host) -> None:
    """A deferred close is recorded before the next call, for the task that closed the file, with the task's
    name at that time.
    """
    mount = traced.mount
    opened_and_read(mount)
    opened_and_read(mount, OTHER)
    with pytest.raises(KernelError):
        mount.getattr("/scratch/nothing")
    with pytest.raises(KernelError):
        mount.open(OTHER, "/scratch/nothing", os.O_RDONLY)
    opened_and_read(mount)
    host.name = "renamed"
    opened_and_read(mount)
    assert events(traced) == [
        ("sh", "opened"), ("sh", "closed"), ("cat", "opened"), ("cat", "closed"), ("cat", "opened"),
        ("sh", "opened"), ("sh", "closed"), ("renamed", "opened"), ("renamed", "closed"),
    ]  # fmt: skip


def test_a_fork_comes_behind_the_close_in_front_of_it(traced: Files, host: Host) -> None:
    define(traced, "kernel_clone")
    opened_and_read(traced.mount)
    host.forked.append(Fork(4003, SHELL.pid, "child", 0, 0, alive=True))
    opened_and_read(traced.mount)
    assert [event for _, event in events(traced)] == ["closed", "opened", "closed"]


def test_no_descriptor_is_left(traced: Files) -> None:
    mount = traced.mount
    before = mount.open(SHELL, FILE, os.O_RDONLY)
    number = file(mount, before).fd
    mount.release(before)
    for path in (FILE, "/scratch/nothing", FILE):
        handle = None
        try:
            handle = mount.open(SHELL, path, os.O_RDONLY)
        except KernelError:
            continue
        assert file(mount, handle).fd == number
        mount.release(handle)
