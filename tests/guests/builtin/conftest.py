"""Fixtures: a booted kernel whose host processes are scripted."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from emulated_kernel.guests.builtin.readers.task_list import TaskInfo
from emulated_kernel.guests.common.client_call import ClientCall
from emulated_kernel.guests.common.host_processes import Fork, ProcessWatch
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig

FIRST_PID = 500
"""First pid of a client. The pids of the tests' process and of its relatives differ from run to run."""
OWN_PID = FIRST_PID - 1


@pytest.fixture
def own_descriptors() -> Iterator[None]:
    """Disable garbage collection during a test.

    Otherwise, it could close descriptors that earlier tests have left open.
    """
    gc.disable()
    yield
    gc.enable()


@dataclass
class ScriptedWatch(ProcessWatch):
    """A ProcessWatch that reports the forks, exits, names and calls of processes that a test has stored."""

    pending_forks: list[Fork] = field(default_factory=list)
    pending_exits: list[int] = field(default_factory=list)
    comms: dict[int, str] = field(default_factory=dict)
    followed: list[int] = field(default_factory=list)
    calls: dict[int, ClientCall] = field(default_factory=dict)
    pins: dict[int, int] = field(default_factory=dict)
    free_fds: dict[int, int] = field(default_factory=dict)
    programs: dict[tuple[int, str], str] = field(default_factory=dict)
    """(pid, name) of a process -> path of the program that the process executes."""
    restarted: set[int] = field(default_factory=set)

    def own_number(self) -> int:
        return OWN_PID

    def has_events(self) -> bool:
        return bool(self.pending_forks or self.pending_exits)

    def forks(self) -> list[Fork]:
        told, self.pending_forks = self.pending_forks, []
        return told

    def exited(self) -> list[int]:
        told, self.pending_exits = self.pending_exits, []
        return told

    def comm(self, pid: int) -> str | None:
        return self.comms.get(pid)

    def follow(self, pid: int) -> None:
        self.followed.append(pid)

    def pinned_to(self, pid: int) -> int | None:
        return self.pins.get(pid)

    def call(self, pid: int, uid: int, instead: str | None = None) -> ClientCall | None:  # noqa: ARG002
        return self.calls.get(pid)

    def next_fd(self, pid: int) -> int | None:
        return self.free_fds.get(pid)

    def program(self, pid: int, comm: str) -> str | None:
        return self.programs.get((pid, comm))

    def has_ended(self, pid: int) -> bool:
        is_new = pid in self.restarted
        self.restarted.discard(pid)
        return is_new


@pytest.fixture
def watch() -> ScriptedWatch:
    return ScriptedWatch()


@pytest.fixture
def kernel(watch: ScriptedWatch) -> Iterator[Kernel]:
    with Kernel(MachineConfig(run_budget=0.2), watch) as kernel:
        yield kernel


def tasks(kernel: Kernel) -> dict[int, TaskInfo]:
    """Return pid -> task of the guest."""
    found = kernel.guest.kernel.tasks()
    return {task.pid: task for task in found}


def dmesg(kernel: Kernel) -> str:
    """Return the kernel log, with one message per line."""
    return "\n".join(message.text for message in kernel.guest.kernel.messages())
