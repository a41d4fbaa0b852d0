"""A long write of definitions is one write(2), but the control lock is yielded to other requests between its
lines.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Callable, Iterator
from threading import Event, Semaphore, Thread

import pytest

from emulated_kernel.guests.builtin.trees.root_layout import RootLayout
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util import control_lock as locks
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.control_lock import ControlLock
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from emulated_kernel.vfs.core.command_file import PIECE_SIZE
from emulated_kernel.vfs.core.node import Owner
from emulated_kernel.vfs.mount import Mount
from kprobefs.daemon.reboot import RebootableKernel

WRITER, OTHER = Client(os.getppid(), 0, 0), Client(1, 0, 0)
FILES = ["/kprobe_events", "/tracing/dynamic_events"]
LINE = "p:long/e{:04} gcd+5 a=%di b=+0(%si):u32 c=$stack0\n"
NUMBER = 200
TEXT = "".join(map(LINE.format, range(NUMBER))).encode()
EVENT = "/tracing/events/long"

Between = Callable[[Callable[[], object]], list[int]]


@pytest.fixture
def kernel() -> Iterator[Kernel]:
    with Kernel() as kernel:
        yield kernel


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Between:
    """Return a function that lets `action` be called whenever a writer yields the control lock.

    The function returns a list, which gets one item per call of `action`. A yield of the lock inside `action`
    does nothing.
    """

    def install(action: Callable[[], object]) -> list[int]:
        times: list[int] = []
        is_acting = False

        def yield_lock(lock: ControlLock) -> None:
            nonlocal is_acting
            assert not lock._depth
            if is_acting:
                return
            times.append(1)
            is_acting = True
            action()
            is_acting = False

        monkeypatch.setattr(ControlLock, "yield_lock", yield_lock)
        return times

    return install


def write(mount: Mount, path: str, data: bytes | str, client: Client = OTHER, *, more: int = 0) -> int:
    handle = mount.open(client, path, os.O_WRONLY | os.O_APPEND | more)
    try:
        return mount.write(client, handle, data.encode() if isinstance(data, str) else data, 0)
    finally:
        mount.release(handle)


def read(mount: Mount, path: str) -> str:
    handle, data = mount.open(OTHER, path, os.O_RDONLY), b""
    while part := mount.read(OTHER, handle, 1 << 16, len(data)):
        data += part
    mount.release(handle)
    return data.decode()


@pytest.mark.parametrize("path", FILES)
@pytest.mark.parametrize("probed", [False, True])
def test_others_come_between(kernel: Kernel, between: Between, path: str, probed: bool) -> None:
    mount, seen = kernel.mount(), []
    if probed:
        write(mount, path, "p:calls vfs_write count=$arg3\nr:ends vfs_write $retval\n")
        write(mount, "/tracing/events/kprobes/calls/filter", f"count == {len(TEXT)}")
        write(mount, "/tracing/events/kprobes/ends/filter", f"arg1 == {len(TEXT)}")
        write(mount, "/tracing/events/kprobes/enable", "1")
    times = between(lambda: seen.append(read(mount, path).count("long/")))
    assert write(mount, path, TEXT, WRITER) == len(TEXT)
    assert len(TEXT) // (PIECE_SIZE + 2 * len(LINE)) <= len(times) <= len(TEXT) // PIECE_SIZE
    assert seen == sorted(set(seen))
    assert 0 < seen[0] < seen[-1] < NUMBER
    assert read(mount, path).count("long/") == NUMBER
    if probed:
        text = read(mount, "/tracing/trace")
        assert (text.count("calls:"), text.count("ends:")) == (1, 1)


@pytest.mark.parametrize("probed", [False, True])
def test_a_bad_line_ends_it(kernel: Kernel, between: Between, probed: bool) -> None:
    mount, bad = kernel.mount(), NUMBER // 2
    if probed:
        write(mount, "/kprobe_events", "r:ends vfs_write $retval:s64\n")
        write(mount, "/tracing/events/kprobes/ends/filter", "arg1 < 0")
        write(mount, "/tracing/events/kprobes/enable", "1")
    lines = TEXT.splitlines(keepends=True)
    between(lambda: None)
    with pytest.raises(KernelError) as failed:
        write(
            mount, "/kprobe_events", b"".join([*lines[:bad], b"p:long/bad no_such\n", *lines[bad:]]), WRITER
        )
    assert failed.value.errno == errno.ENOENT
    assert read(mount, "/kprobe_events").count("long/") == bad
    if probed:
        assert f"arg1=-{errno.ENOENT}" in read(mount, "/tracing/trace")


def test_what_others_do_stays(kernel: Kernel, between: Between) -> None:
    """Changes that other clients make between the pieces of a long write stay.

    The other clients enable and disable one event of this write, and remove another event of the write. They
    also define further events, make and remove instances, and call a function.
    """
    mount = kernel.mount()
    turn = iter(range(NUMBER))

    def others() -> None:
        number = next(turn)
        write(mount, f"{EVENT}/e0001/enable", f"{number % 2}")
        write(mount, "/kprobe_events", f"p:theirs/t{number} gcd+5\n")
        if number:
            mount.rmdir(OTHER, f"/tracing/instances/i{number - 1}")
        else:
            write(mount, "/kprobe_events", "-:long/e0000\n")
        mount.mkdir(OTHER, f"/tracing/instances/i{number}", 0o755)
        assert kernel.call("gcd", 12, 18) == 6

    times = between(others)
    assert write(mount, "/kprobe_events", TEXT, WRITER) == len(TEXT)
    listed = read(mount, "/kprobe_events")
    assert (listed.count("long/"), listed.count("theirs/")) == (NUMBER - 1, len(times))
    assert read(mount, f"{EVENT}/e0001/enable") == f"{(len(times) - 1) % 2}\n"


@pytest.mark.parametrize("probed", [False, True])
def test_the_guest_is_lost_meanwhile(kernel: Kernel, between: Between, probed: bool) -> None:
    mount = kernel.mount()
    if probed:
        write(mount, "/kprobe_events", "p:calls vfs_write\n")
        write(mount, "/tracing/events/kprobes/enable", "1")
    between(lambda: kernel.guest.runner._die("lost"))
    assert write(mount, "/kprobe_events", TEXT, WRITER) == len(TEXT)
    assert kernel.guest.is_dead
    assert read(mount, "/kprobe_events").count("long/") == NUMBER


@pytest.mark.parametrize("probed", [False, True])
def test_a_reboot_meanwhile_ends_it(between: Between, probed: bool) -> None:
    """A reboot between the pieces of a long write ends the write with ESTALE.

    Events that were already defined stay.
    """
    living = RebootableKernel(MachineConfig(), RootLayout.FULL, Owner(0, 0))
    mount = living.mount
    if probed:
        write(mount, "/kprobe_events", "p:calls vfs_write\n")
        write(mount, "/tracing/events/kprobes/enable", "1")
    times = between(lambda: write(mount, "/machine/power", "reboot\n"))
    with pytest.raises(KernelError) as failed:
        write(mount, "/kprobe_events", TEXT, WRITER)
    assert (failed.value.errno, len(times)) == (errno.ESTALE, 1)
    assert 0 < read(mount, "/kprobe_events").count("long/") < NUMBER
    assert write(mount, "/kprobe_events", "p:again gcd\n", WRITER) > 0
    mount.close()
    living._kernel.close()


def await_waiter(lock: ControlLock) -> None:
    while not lock._waiters:
        time.sleep(0.001)


def test_each_waits_for_one_piece(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that asks for the control lock during a piece of a long write gets the lock after
    this piece.
    """
    events = kernel.tracing.kprobe_events
    execute, go = events.write, Semaphore(0)
    counts: list[int] = []
    pieces = 0

    def execute_while_another_waits(data: bytes) -> int:
        nonlocal pieces
        taken = execute(data)
        pieces += 1
        go.release()
        await_waiter(mount.lock)
        return taken

    def others() -> None:
        while NUMBER not in counts:
            assert go.acquire(timeout=60)
            counts.append(sum(entry.name.startswith("e0") for entry in mount.readdir(EVENT)))

    monkeypatch.setattr(events, "write", execute_while_another_waits)
    mount = kernel.mount()
    monkeypatch.setattr(locks, "MAX_YIELD_SECONDS", 60.0)
    monkeypatch.setattr(locks, "sleep", lambda _seconds: time.sleep(0.001))
    other = Thread(target=others)
    other.start()
    assert write(mount, "/kprobe_events", TEXT, WRITER) == len(TEXT)
    other.join()
    assert len(counts) == pieces > len(TEXT) // (PIECE_SIZE + 2 * len(LINE))
    assert counts == sorted(set(counts))


def test_who_was_served_and_waits_again_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, served, again = ControlLock(), Event(), Event()
    looks: list[float] = []

    def wait_twice() -> None:
        with lock:
            served.set()
        assert again.wait(60)
        with lock:
            pass

    def look(seconds: float) -> None:
        looks.append(seconds)
        assert len(looks) == 1, "it waits for a wait that began later"
        lock.__exit__()
        assert served.wait(60)
        lock.__enter__()
        again.set()
        await_waiter(lock)

    waiter = Thread(target=wait_twice)
    with lock:
        waiter.start()
        await_waiter(lock)
        monkeypatch.setattr(locks, "sleep", look)
        monkeypatch.setattr(locks, "monotonic", lambda: 0.0)
        # The waiter is served during the first sleep, and then waits again: yield_lock must not sleep twice.
        lock.yield_lock()
    waiter.join()
    assert looks


def test_its_data_stay_while_others_write(kernel: Kernel, between: Between) -> None:
    """While other clients write, the guest's buffer keeps the data of a long write, because a probe may read
    the data later.
    """
    mount, buffers = kernel.mount(), kernel.guest.buffers
    write(mount, "/kprobe_events", "p:calls vfs_write\n")
    write(mount, "/tracing/events/kprobes/enable", "1")
    task = kernel.guest.processes.task_of(WRITER.pid, 0, 0)
    seen: list[bytes] = []

    def others() -> None:
        write(mount, "/tracing/trace_marker", "x" * 4096)
        assert task.request is not None
        seen.append(kernel.machine.memory.read(task.request.args[1], len(TEXT)))

    between(others)
    assert write(mount, "/kprobe_events", TEXT, WRITER) == len(TEXT)
    assert set(seen) == {TEXT}
    # The buffer that all reads share is never given back.
    assert buffers._made == len(buffers._free) + 1


@pytest.mark.parametrize("probed", [False, True])
def test_what_would_block_gives_no_way(
    kernel: Kernel, between: Between, monkeypatch: pytest.MonkeyPatch, probed: bool
) -> None:
    """If a piece of a long write would block, the write raises WouldBlock, and the client can write again."""
    events = kernel.tracing.kprobe_events
    execute = events.write
    goes_on = [False, True]

    def would_block(data: bytes) -> int:
        if goes_on.pop():
            return execute(data)
        raise WouldBlock

    if probed:
        write(kernel.mount(), "/kprobe_events", "p:calls vfs_write\n")
        write(kernel.mount(), "/tracing/events/kprobes/enable", "1")
    monkeypatch.setattr(events, "write", would_block)
    mount = kernel.mount()
    times = between(lambda: None)
    with pytest.raises(WouldBlock):
        write(mount, "/kprobe_events", TEXT, WRITER)
    assert len(times) == 1
    # No system call is left asleep in the guest.
    assert kernel.guest.processes.task_of(WRITER.pid, 0, 0).request is None
    monkeypatch.undo()
    assert write(kernel.mount(), "/kprobe_events", "p:again gcd\n", WRITER) > 0


@pytest.mark.parametrize("probed", [False, True])
def test_a_short_take_ends_it(
    kernel: Kernel, between: Between, monkeypatch: pytest.MonkeyPatch, probed: bool
) -> None:
    """If the file takes only a part of a piece, the write returns the number of bytes taken until then.

    Later lines are not executed.
    """
    events = kernel.tracing.kprobe_events
    execute, shorts = events.write, [True, False]
    between(lambda: None)

    def take(data: bytes) -> int:
        return execute(data[: data.index(b"\n") + 1] if shorts.pop() else data)

    if probed:
        write(kernel.mount(), "/kprobe_events", "p:calls vfs_write\n")
        write(kernel.mount(), "/tracing/events/kprobes/enable", "1")
    monkeypatch.setattr(events, "write", take)
    mount = kernel.mount()
    taken = write(mount, "/kprobe_events", TEXT, WRITER)
    assert PIECE_SIZE < taken < 2 * PIECE_SIZE
    assert read(mount, "/kprobe_events").count("long/") == TEXT[:taken].count(b"\n")


def test_a_reboot_of_many_instances_gives_way_for_each(between: Between) -> None:
    """A reboot yields the control lock at least twice per instance."""
    times = []
    for instances in (0, 30):
        living = RebootableKernel(MachineConfig(), RootLayout.FULL, Owner())
        for number in range(instances):
            living.mount.mkdir(OTHER, f"/tracing/instances/i{number}", 0o755)
        left = between(lambda: None)
        write(living.mount, "/machine/power", "reboot\n")
        times.append(len(left))
        living.mount.close()
    assert times[1] - times[0] >= 2 * 30
