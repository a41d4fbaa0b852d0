"""Reader of the guest's task list and of its CPUs' per-CPU areas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from emulated_kernel.image.kallsyms import Kallsyms
from emulated_kernel.machine.guest_info import CpuInfo, TaskInfo
from emulated_kernel.machine.memory.memory import Memory

_LETTERS = {0: "R", 1: "S", 2: "D", 0x80: "X", 0x402: "I"}
"""task_struct.__state -> the letter that ps shows. Mirrors: include/linux/sched.h:task_index_to_char."""
_MAX_TASKS = 1 << 16
"""Maximum number of tasks that are read; a longer list is corrupted."""


def read_tasks(memory: Memory, symbols: Kallsyms, abi: Mapping[str, int]) -> Iterator[TaskInfo]:
    """Yield all tasks, the idle task first. Raises: MemoryFault (the guest has corrupted its list)."""
    link = abi["task_struct.tasks"]
    first = symbols.lookup_name("init_task") or 0
    task = first
    for _ in range(_MAX_TASKS):
        yield read_task(memory, task, abi)
        task = memory.read_word(task + link) - link
        if task == first:
            return


def read_task(memory: Memory, task: int, abi: Mapping[str, int]) -> TaskInfo:
    """Return the task whose task_struct is at address `task`. Raises: MemoryFault (there is none)."""

    def word(field: str) -> int:
        return memory.read_u32(task + abi[f"task_struct.{field}"])

    parent = memory.read_word(task + abi["task_struct.real_parent"])
    cred = memory.read_word(task + abi["task_struct.cred"])
    comm = memory.read(task + abi["task_struct.comm"], 16).split(b"\0", 1)[0]
    return TaskInfo(
        addr=task,
        pid=word("pid"),
        parent=memory.read_u32(parent + abi["task_struct.pid"]) if parent else 0,
        uid=memory.read_u32(cred + abi["cred.uid"]) if cred else 0,
        state=_LETTERS.get(word("state"), "?"),
        comm=comm.decode("utf-8", "surrogateescape"),
    )


def read_cpus(memory: Memory, abi: Mapping[str, int], areas: Sequence[int]) -> Iterator[CpuInfo]:
    """Yield all CPUs; `areas` has the addresses of their per-CPU areas.

    Raises: MemoryFault (the guest has corrupted pointers in these areas).
    """
    for number, area in enumerate(areas):
        queue = area + abi["percpu.runqueues"]
        yield CpuInfo(
            number=number,
            task=read_task(memory, memory.read_word(area + abi["percpu.current_task"]), abi),
            runnable=memory.read_u32(queue + abi["rq.nr_running"]),
            switches=int.from_bytes(memory.read(queue + abi["rq.nr_switches"], 8), "little"),
            interrupts=memory.read_word(area + abi["percpu.irqs_sum"]),
        )
