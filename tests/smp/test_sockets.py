"""Sockets on several CPUs: all data that tasks send arrives, whatever other tasks run in between."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import pytest

from emulated_kernel.guests.builtin.runner.guest_runner import GuestTask, Request
from emulated_kernel.kernel.api import Kernel
from tests.smp.conftest import Boot, clients
from tests.smp.seeds import seeds
from tests.smp.test_races import assert_well, function_calls, together

ARCHITECTURES = ("x86_64", "i386", "riscv64")
SEEDS = seeds(4, 4)
AF_INET, STREAM, DGRAM, ICMP = 2, 1, 2, 1
SOCKADDR = 16
MAX_DATAGRAM = 1400
LOADS = {"load_tcp": 3, "load_udp": 20, "load_ping": 20}


@dataclass
class Sockets:
    """System calls on sockets, made by one task or by several tasks at the same time, with buffers in user
    memory.
    """

    kernel: Kernel
    tasks: Sequence[GuestTask]

    def buffer(self, data: bytes = b"") -> int:
        page = self.kernel.guest.buffers.get()
        self.kernel.machine.memory.write(page, data)
        return page

    def call(self, name: str, *args: int) -> int:
        nr = self.kernel.guest.syscalls.number(name)
        return self.kernel.guest.runner.syscall(self.tasks[0], nr, *args)

    def at_once(self, calls: Sequence[tuple[str, tuple[int, ...]]]) -> list[int]:
        """Run one system call of each task, all at the same time, and return the results."""
        number = self.kernel.guest.syscalls.number
        requests = [Request(number(name), args, None) for name, args in calls]
        return together(self.kernel, list(zip(self.tasks, requests, strict=False)))

    def port_of(self, fd: int) -> int:
        name = self.buffer(bytes(SOCKADDR) + struct.pack("<I", SOCKADDR))
        assert self.call("getsockname", fd, name, name + SOCKADDR) == 0
        (port,) = struct.unpack(">H", self.kernel.machine.memory.read(name + 2, 2))
        return int(port)

    def bound(self, kind: int) -> tuple[int, int]:
        """Return a new socket that is bound to a free port, and the guest address of a sockaddr with this
        port.
        """
        fd = self.call("socket", AF_INET, kind, 0)
        name = self.buffer(loopback(0))
        assert self.call("bind", fd, name, SOCKADDR) == 0
        self.kernel.machine.memory.write(name, loopback(self.port_of(fd)))
        return fd, name


def loopback(port: int) -> bytes:
    return struct.pack("<H", AF_INET) + struct.pack(">HI", port, 0x7F00_0001) + bytes(8)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", SEEDS)
def test_streams(boot: Boot, arch: str, seed: int) -> None:
    """Four connections to one listener, made at once, transfer all data unchanged.

    Four tasks write to the connections while four tasks read.
    """
    kernel = boot(4, arch, seed=seed, quantum=60)
    net = Sockets(kernel, clients(kernel, 8))
    listener, name = net.bound(STREAM)
    assert net.call("listen", listener, 8) == 0
    ours = [net.call("socket", AF_INET, STREAM, 0) for _ in range(4)]
    connects = [("connect", (fd, name, SOCKADDR)) for fd in ours]
    results = net.at_once([*connects, *[("accept4", (listener, 0, 0, 0))] * 4])
    assert results[:4] == [0] * 4
    theirs = results[4:]
    assert len(set(theirs) | set(ours)) == 8

    chooser = random.Random(seed)
    sent = dict.fromkeys(ours, b"")
    got = dict.fromkeys(theirs, b"")
    out, into = ([net.buffer() for _ in range(4)] for _ in range(2))
    for _ in range(6):
        calls: list[tuple[str, tuple[int, ...]]] = []
        for fd, page in zip(ours, out, strict=True):
            data = chooser.randbytes(chooser.randrange(1, 3000))
            kernel.machine.memory.write(page, data)
            sent[fd] += data
            calls.append(("write", (fd, page, len(data))))
        calls += [("read", (fd, page, 4096)) for fd, page in zip(theirs, into, strict=True)]
        results = net.at_once(calls)
        assert results[:4] == [args[2] for _, args in calls[:4]]
        for fd, page, count in zip(theirs, into, results[4:], strict=True):
            assert count > 0
            got[fd] += kernel.machine.memory.read(page, count)
    assert net.at_once([("close", (fd,)) for fd in ours]) == [0] * 4
    for fd, page in zip(theirs, into, strict=True):
        while count := net.call("read", fd, page, 4096):
            assert count > 0
            got[fd] += kernel.machine.memory.read(page, count)
    assert sorted(got.values()) == sorted(sent.values())
    assert net.at_once([("close", (fd,)) for fd in theirs]) == [0] * 4
    assert_well(kernel)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", SEEDS)
def test_datagrams(boot: Boot, arch: str, seed: int) -> None:
    """Four tasks send datagrams to one socket while four other tasks receive: no datagram is lost
    or changed.
    """
    kernel = boot(4, arch, seed=seed, quantum=60)
    net = Sockets(kernel, clients(kernel, 8))
    receiver, name = net.bound(DGRAM)
    senders = [net.call("socket", AF_INET, DGRAM, 0) for _ in range(4)]
    chooser = random.Random(seed)
    out, into = ([net.buffer() for _ in range(4)] for _ in range(2))
    sent, got = [], []
    for _ in range(6):
        calls: list[tuple[str, tuple[int, ...]]] = []
        for fd, page in zip(senders, out, strict=True):
            data = chooser.randbytes(chooser.randrange(1, MAX_DATAGRAM))
            kernel.machine.memory.write(page, data)
            sent.append(data)
            calls.append(("sendto", (fd, page, len(data), 0, name, SOCKADDR)))
        calls += [("recvfrom", (receiver, page, 2048, 0, 0, 0)) for page in into]
        results = net.at_once(calls)
        assert results[:4] == [args[2] for _, args in calls[:4]]
        got += [kernel.machine.memory.read(page, n) for page, n in zip(into, results[4:], strict=True)]
    assert sorted(got) == sorted(sent)
    assert_well(kernel)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", SEEDS)
def test_loads_of_all_kinds(boot: Boot, arch: str, seed: int) -> None:
    """TCP, UDP and ping loads run at the same time, each twice. Both runs of a load return the same
    number.
    """
    kernel = boot(4, arch, seed=seed, quantum=80)
    tasks = clients(kernel, 6)
    with ExitStack() as stack:
        calls = [
            stack.enter_context(function_calls(kernel, [task], name, n))[0]
            for task, (name, n) in zip(tasks, [*LOADS.items()] * 2, strict=True)
        ]
        results = together(kernel, calls)
    assert results[:3] == results[3:]
    assert min(results) > 0
    assert len(set(results)) == 3
    assert_well(kernel)
