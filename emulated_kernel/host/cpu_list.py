"""The guest's CPUs, read from their per-CPU areas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from emulated_kernel.host.task_list import TaskInfo, read_task


class CpuMemory(Protocol):
    word_size: int

    def read(self, va: int, size: int) -> bytes: ...

    def read_word(self, va: int) -> int: ...

    def read_u32(self, va: int) -> int: ...


@dataclass(frozen=True)
class CpuInfo:
    """A CPU as machine/cpus shows it."""

    number: int
    task: TaskInfo
    """What it runs, or stands in while the guest stands still."""
    runnable: int
    """Tasks that wait for it."""
    switches: int
    """Task switches since boot."""
    interrupts: int
    """Hard interrupts since boot."""

    @property
    def is_idle(self) -> bool:
        """Whether it has nothing to do."""
        return self.task.pid == 0


def read_cpus(memory: CpuMemory, abi: Mapping[str, int], areas: Sequence[int]) -> Iterator[CpuInfo]:
    """All CPUs, by the addresses of their per-CPU areas.

    Raises: MemoryFault where the guest has corrupted what they point to.
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
