"""Clients as tasks of a distribution's kernel: many tasks, their files and memory, calls that sleep, and
exits.
"""

from __future__ import annotations

import errno
import os
import random
import struct
from collections.abc import Iterator

import pytest

from emulated_kernel.guests.linux.guest.execve import ExecObserver
from emulated_kernel.guests.linux.guest.kernel_structs import KernelStructs
from emulated_kernel.guests.linux.guest.syscalls import LinuxSyscalls
from emulated_kernel.guests.linux.guest.tasks import Blocked, LinuxTask, LinuxTasks
from emulated_kernel.guests.linux.initramfs import BUFFER
from emulated_kernel.machine.traps.trap import GuestFault
from emulated_kernel.util.errors import KernelError
from tests.guests.linux import debian_kernel

READ, WRITE, PIPE, GETPID, GETUID, KILL, PRCTL = 0, 1, 22, 39, 102, 62, 157
PR_GET_NAME = 16


@pytest.fixture
def guest() -> Iterator[LinuxTasks]:
    found = debian_kernel.tasks()
    yield found
    found.machine.close()


def test_a_task_has_its_process_s_pid_name_and_owner(guest: LinuxTasks) -> None:
    task = guest.fork(guest.init, 123456)
    guest.set_comm(task, "a-name-that-is-too-long")
    guest.set_creds(task, 1000, 100)
    assert guest.call(task, GETPID) == task.pid == 123456
    assert guest.call(task, GETUID) == 1000
    guest.call(task, PRCTL, PR_GET_NAME, BUFFER)
    assert guest.copy_from_user(task, BUFFER, 16) == b"a-name-that-is-\0"
    with pytest.raises(KernelError) as refused:
        guest.call(task, KILL, 1, 9)
    assert refused.value.errno == errno.EPERM


def test_a_pid_that_the_kernel_has_given_away_is_another(guest: LinuxTasks) -> None:
    assert guest.fork(guest.init, 2).pid > 2


def test_a_kernel_thread_of_the_same_moment_does_not_take_the_pid() -> None:
    """A kernel thread that is created between the request for a fork and the fork does not take the pid of
    the child.
    """
    guest, kernel = debian_kernel.with_kernel()
    [clone] = kernel.kallsyms.by_name("kernel_clone")
    structs = KernelStructs(guest.machine, guest.facts.offsets)
    next_pid = structs.member(guest.facts.symbols["init_pid_ns"], "pid_namespace.idr.idr_next")
    clones = 0

    def take_pids() -> None:
        nonlocal clones
        clones += 1
        structs.store("<i", next_pid, 777)

    try:
        guest.machine.call_at(clone.address, take_pids)
        assert guest.fork(guest.init, 501).pid == 501
        assert structs.load_s32(next_pid) == 777
        assert guest.fork(guest.init, 502).pid == 502
        assert clones == 2
    finally:
        guest.machine.close()


def test_random_clients_against_a_model(guest: LinuxTasks) -> None:
    """After random calls, forks and exits of several clients, files have the contents that a model
    predicts.
    """
    dice = random.Random(1)
    calls = LinuxSyscalls(guest)
    clients = [guest.fork(guest.init, 1000 + number) for number in range(6)]
    files: dict[str, bytes] = {}
    for step in range(400):
        client, name = dice.choice(clients), f"/scratch/{dice.randrange(5)}"
        what = dice.randrange(6)
        if what == 0:
            files[name] = dice.randbytes(dice.randrange(9000))
            fd = calls.open(client, name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            assert calls.write(client, fd, files[name], None) == len(files[name])
            calls.close(client, fd)
        elif what == 1 and name in files:
            fd = calls.open(client, name, os.O_RDONLY)
            size = calls.begin_read(client, fd, 10_000, None, may_block=True)
            assert calls.read_data(client, size, size) == files[name]
            calls.close(client, fd)
        elif what == 2 and name in files:
            assert calls.lstat(name).size == len(files[name])
        elif what == 3:
            if files.pop(name, None) is None:
                with pytest.raises(KernelError, match="No such file"):
                    calls.on_path(client, "unlinkat", name, 0)
            else:
                calls.on_path(client, "unlinkat", name, 0)
        elif what == 4:
            assert guest.call(client, GETPID) == client.pid
        else:
            guest.exit(client)
            assert not client.alive
            clients[clients.index(client)] = guest.fork(guest.init, 2000 + step)
    names = {entry.name for entry in calls.listdir("/scratch")} - {".", ".."}
    assert {f"/scratch/{name}" for name in names} == files.keys()


def pipe(guest: LinuxTasks, task: LinuxTask) -> tuple[int, int]:
    guest.call(task, PIPE, BUFFER)
    reader, writer = struct.unpack("<2i", guest.copy_from_user(task, BUFFER, 8))
    return reader, writer


def test_a_read_sleeps_until_another_client_writes(guest: LinuxTasks) -> None:
    reading, writing = guest.fork(guest.init, 501), guest.fork(guest.init, 502)
    reader, writer = pipe(guest, reading)
    with pytest.raises(Blocked):
        guest.call(reading, READ, reader, BUFFER, 10, patience=1000)
    with pytest.raises(Blocked):
        guest.wait_for_result(reading, 1000)
    guest.copy_to_user(writing, BUFFER, b"hello")
    assert guest.call(writing, WRITE, writer, BUFFER, 5) == 5
    assert guest.wait_for_result(reading, 1000) == 5
    assert guest.copy_from_user(reading, BUFFER, 5) == b"hello"


def test_a_call_that_sleeps_without_end_is_given_up_by_its_cpu_time(
    guest: LinuxTasks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each run up to the next tick is short, so only the time of all runs ends the call."""
    task, other = guest.fork(guest.init, 501), guest.fork(guest.init, 502)
    reader, _ = pipe(guest, task)
    guest.machine._watchdog.budget = 0.2
    timer = guest.machine.timer
    ticks = 0

    def counted() -> None:
        nonlocal ticks
        ticks += 1
        timer()

    monkeypatch.setattr(guest.machine, "timer", counted)
    with pytest.raises(GuestFault, match="task 501 doesn't come back from its call"):
        guest.call(task, READ, reader, BUFFER, 10)
    assert ticks < 60_000
    with pytest.raises(GuestFault):
        guest.call(other, GETPID)


def test_a_fork_that_sleeps_without_end_is_given_up() -> None:
    """Each fork waits for the writer of a lock, which never releases it."""
    guest, kernel = debian_kernel.with_kernel()
    memory = KernelStructs(guest.machine, guest.facts.offsets)
    [lock] = kernel.kallsyms.by_name("cgroup_threadgroup_rwsem")
    for member in ("rss.gp_state", "block"):
        at = lock.address + kernel.btf.offset(f"percpu_rw_semaphore.{member}")
        memory.store("<I", memory.physical(at), 1)
    guest.machine._watchdog.budget = 0.2
    with pytest.raises(GuestFault, match="task 1 doesn't come back from its fork"):
        guest.fork(guest.init, 501)
    with pytest.raises(GuestFault):
        guest.call(guest.init, GETPID)
    guest.machine.close()


def test_who_sleeps_in_a_call_can_be_ended(guest: LinuxTasks) -> None:
    task, other = guest.fork(guest.init, 501), guest.fork(guest.init, 502)
    reader, _ = pipe(guest, task)
    with pytest.raises(Blocked):
        guest.call(task, READ, reader, BUFFER, 10, patience=1000)
    guest.exit(task)
    assert not task.alive
    with pytest.raises(KernelError, match="has ended"):
        guest.call(task, GETPID)
    assert guest.call(other, GETPID) == 502
    assert guest.fork(guest.init, 501).pid == 501


def test_memory_is_each_task_s_own(guest: LinuxTasks) -> None:
    first = guest.fork(guest.init, 501)
    guest.copy_to_user(first, BUFFER, b"x" * 10_000)
    second = guest.fork(first, 502)
    assert guest.copy_from_user(second, BUFFER, 10_000) == bytes(10_000)
    guest.copy_to_user(second, BUFFER + 5000, b"y" * 100)
    assert guest.copy_from_user(first, BUFFER, 10_000) == b"x" * 10_000


def users_of_the_table(guest: LinuxTasks) -> int:
    """Return the number of users of the table of open files that all tasks share."""
    offsets = guest.facts.offsets
    memory, root = guest.machine.memory, guest.machine.cpu.root
    table = memory.read_word(root, guest.init.address + offsets["task_struct.files"])
    return int.from_bytes(memory.read(root, table + offsets["files_struct.count"], 4), "little")


def test_who_executes_a_program_keeps_what_all_share(guest: LinuxTasks) -> None:
    calls, executions, path = LinuxSyscalls(guest), ExecObserver(guest), "/usr/bin/a-name-that-is-too-long"
    task = guest.fork(guest.init, 501)
    fd = calls.open(task, "/scratch/file", os.O_RDWR | os.O_CREAT, 0o600)
    for number in range(3):
        executions.execute(task, f"{path}{number}", path.rpartition("/")[2][:15])
        guest.set_comm(task, "sh")
        assert not task.entries
        assert users_of_the_table(guest) == 2
    executions.execute(task, path, "a-name-that-is-")
    child = guest.fork(task, 502)
    assert guest.call(child, GETPID) == 502
    guest.call(child, PRCTL, PR_GET_NAME, BUFFER)
    assert guest.copy_from_user(child, BUFFER, 16) == b"a-name-that-is-\0"
    assert calls.write(child, fd, b"text", None) == 4
    assert calls.read_all("/proc/501/cmdline") == path.encode() + b"\0"
    guest.exit(child)
    calls.close(task, fd)
    guest.exit(task)
    assert calls.read_all("/scratch/file") == b"text"
    assert users_of_the_table(guest) == 1


def test_who_can_execute_nothing_is_renamed(guest: LinuxTasks) -> None:
    task = guest.fork(guest.init, 501)
    calls = LinuxSyscalls(guest)
    calls.on_path(guest.init, "fchmodat", "/init", 0o600)
    ExecObserver(guest).execute(task, "/bin/program", "program")
    assert calls.read_all("/proc/501/comm") == b"program\n"
    assert b"program" not in calls.read_all("/proc/501/cmdline")
    assert users_of_the_table(guest) == 2


def test_the_same_requests_end_in_the_same_memory() -> None:
    ends = []
    for _ in range(2):
        guest = debian_kernel.tasks()
        clients = [guest.fork(guest.init, 700 + number) for number in range(3)]
        for number in range(60):
            guest.call(clients[number % 3], GETPID)
        guest.idle(50_000)
        machine = guest.machine
        ends.append((hash(bytes(machine.memory.ram)), machine.pc.state(), machine.regs.snapshot()))
        machine.close()
    assert ends[0] == ends[1]


def test_a_dead_guest_says_why(guest: LinuxTasks) -> None:
    """The end of init is a panic of the kernel: later calls fail, and the console has the reason."""
    with pytest.raises(GuestFault):
        guest.exit(guest.init)
    with pytest.raises(GuestFault):
        guest.call(guest.init, GETPID)
    assert b"Attempted to kill init" in guest.machine.pc.console
    assert guest.machine.death
