"""SyscallWork, the count in the guest of the enabled tracepoints of system calls.

A failure changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from errno import ENOMEM
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest

from emulated_kernel.guests.linux.probing.kernel_tracepoints import EventBatch, KernelTracepoints
from emulated_kernel.guests.linux.probing.syscall_work import SyscallWork
from emulated_kernel.machine.traps.trap import MemoryFault

COUNT, TASKS, FLAG = 0x1000, (0x2000, 0x3000), 1 << 2


class Guest:
    """Memory of a guest with the count of SyscallWork and the flags of two tasks."""

    def __init__(self, count: int, old_flag: int = 0) -> None:
        self.memory = {COUNT: count, **dict.fromkeys(TASKS, 8)}
        self.is_damaged = False
        btf = SimpleNamespace(
            find=lambda *_: None,
            enumerators=lambda _: {"SYSCALL_WORK_BIT_SYSCALL_TRACEPOINT": 2},
            offset=lambda _: 0,
            has=lambda _: not old_flag,
        )
        kernel = SimpleNamespace(btf=btf, kallsyms=SimpleNamespace(lookup_name=lambda _: COUNT))
        memory = SimpleNamespace(
            read=lambda at, size: self.memory[at].to_bytes(size, "little"),
            write=lambda at, data: self.memory.update({at: int.from_bytes(data, "little")}),
            read_word=self.memory.__getitem__,
            write_word=self.memory.__setitem__,
        )
        self.work = SyscallWork(cast(Any, kernel), cast(Any, memory), self._tasks, old_flag)

    def _tasks(self) -> Iterator[int]:
        yield TASKS[0]
        if self.is_damaged:
            raise MemoryFault(0)
        yield TASKS[1]

    def has(self, count: int, flags: int) -> bool:
        return self.memory == {COUNT: count, **dict.fromkeys(TASKS, flags)}


@pytest.mark.parametrize("old_flag", [0, 1 << 28])
def test_the_first_need_sets_the_flag_and_the_last_one_clears_it(old_flag: int) -> None:
    """While any tracepoint of system calls is on, all tasks have the flag for work at system calls.

    The flag is in thread_info.syscall_work or, before Linux 5.11, in thread_info.flags.
    """
    guest = Guest(0, old_flag)
    flag = old_flag or FLAG
    assert guest.work.is_known()
    for on, count, flags in (
        (True, 1, 8 | flag),
        (True, 2, 8 | flag),
        (False, 1, 8 | flag),
        (False, 0, 8),
        (False, 0xFFFFFFFF, 8),
    ):
        guest.work.switch(on)
        assert guest.has(count, flags)


@pytest.mark.parametrize("on", [True, False])
def test_a_damaged_list_of_tasks_changes_nothing(on: bool) -> None:
    guest = Guest(0 if on else 1)
    before = dict(guest.memory)
    guest.is_damaged = True
    with pytest.raises(MemoryFault):
        guest.work.switch(on)
    assert guest.memory == before


@pytest.mark.parametrize("fails", ["_prepare", "_switch"])
@pytest.mark.parametrize("on", [True, False])
def test_a_tracepoint_that_cannot_be_switched_needs_as_much_as_before(
    on: bool, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise MemoryError

    guest = Guest(0 if on else 1)
    if not on:
        guest.memory.update(dict.fromkeys(TASKS, 8 | FLAG))
    before = dict(guest.memory)
    points = object.__new__(KernelTracepoints)
    points._syscall_work = guest.work
    monkeypatch.setattr(points, "_prepare", lambda _batch: None)
    monkeypatch.setattr(points, fails, refused)
    with pytest.raises(MemoryError):
        points._switch_registered(guest.work.switch, cast(Any, None), cast(Any, None), 0, on)
    assert guest.memory == before


@pytest.mark.parametrize("on", [True, False])
@pytest.mark.parametrize("refuses", [False, True])
def test_a_regfunc_of_a_tracepoint_that_cannot_be_switched_is_undone(
    on: bool, refuses: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a tracepoint cannot be switched, its regfunc is undone.

    The first error is raised, even if the undoing also fails.
    """
    functions = {"regfunc": 0x4000, "unregfunc": 0x5000}
    called: list[int] = []

    def call(function: int) -> int:
        called.append(function)
        return -ENOMEM if refuses and len(called) == 2 else 0

    def damaged(*_: object) -> None:
        raise MemoryFault(0)

    points = object.__new__(KernelTracepoints)
    points._call = call
    monkeypatch.setattr(points, "_prepare", lambda _batch: None)
    monkeypatch.setattr(points, "_switch", damaged)
    monkeypatch.setattr(points, "_function", lambda _event, name: functions[name])
    event, batch = cast(Any, None), EventBatch(cast(Any, None), cast(Any, None))
    with pytest.raises(MemoryFault):
        points._switch_registered(partial(points._register, event, batch), event, batch, 0, on)
    assert called == list(functions.values())[:: 1 if on else -1]
