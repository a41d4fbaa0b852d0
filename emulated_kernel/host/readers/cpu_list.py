"""The guest's CPUs, read from their per-CPU areas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from emulated_kernel.host.readers.task_list import read_task
from emulated_kernel.machine.guest_info import CpuInfo
from emulated_kernel.machine.memory.memory import Memory


def read_cpus(memory: Memory, abi: Mapping[str, int], areas: Sequence[int]) -> Iterator[CpuInfo]:
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
