"""Reads the guest's task list and its per-CPU areas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from emulated_kernel.image.kallsyms import Kallsyms
from emulated_kernel.machine.guest_info import CpuInfo, TaskInfo
from emulated_kernel.machine.memory.guest_reader import GuestReader

_LETTERS = {0: "R", 1: "S", 2: "D", 0x80: "X", 0x402: "I"}
"""Value of task_struct.__state -> the letter that ps shows.

Mirrors: include/linux/sched.h:task_index_to_char.
"""


def task_structs(reader: GuestReader, symbols: Kallsyms, abi: Mapping[str, int]) -> Iterator[int]:
    """Yield the addresses of all task_structs, the idle task's first.

    Raises: MemoryFault (the list is damaged; raised after its intact part).
    """
    link = abi["task_struct.tasks"]
    first = symbols.lookup_name("init_task") or 0
    yield first
    for node in reader.nodes(first + link):
        yield node - link


def read_tasks(reader: GuestReader, symbols: Kallsyms, abi: Mapping[str, int]) -> Iterator[TaskInfo]:
    """Yield all tasks, the idle task first. A damaged task is reported and left out."""
    return reader.each(task_structs(reader, symbols, abi), lambda task: read_task(reader, task, abi))


def read_task(reader: GuestReader, task: int, abi: Mapping[str, int]) -> TaskInfo:
    """Return the task whose task_struct is at address `task`. Raises: MemoryFault (it is unreadable)."""

    def word(field: str) -> int:
        return reader.u32(task + abi[f"task_struct.{field}"])

    parent = reader.word(task + abi["task_struct.real_parent"])
    cred = reader.word(task + abi["task_struct.cred"])
    comm = reader.read(task + abi["task_struct.comm"], 16).split(b"\0", 1)[0]
    return TaskInfo(
        addr=task,
        pid=word("pid"),
        parent=reader.u32(parent + abi["task_struct.pid"]) if parent else 0,
        uid=reader.u32(cred + abi["cred.uid"]) if cred else 0,
        state=_LETTERS.get(word("state"), "?"),
        comm=comm.decode("utf-8", "surrogateescape"),
    )


def read_cpus(reader: GuestReader, abi: Mapping[str, int], areas: Sequence[int]) -> Iterator[CpuInfo]:
    """Yield the state of each CPU whose per-CPU area is intact; `areas`: addresses of the per-CPU areas."""

    def read(number: int) -> CpuInfo:
        area = areas[number]
        queue = area + abi["percpu.runqueues"]
        return CpuInfo(
            number=number,
            task=read_task(reader, reader.word(area + abi["percpu.current_task"]), abi),
            runnable=reader.u32(queue + abi["rq.nr_running"]),
            switches=reader.number(queue + abi["rq.nr_switches"], 8),
            interrupts=reader.word(area + abi["percpu.irqs_sum"]),
        )

    return reader.each(range(len(areas)), read)
