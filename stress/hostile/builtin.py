"""Readers of guest memory for kprobefs's own kernel, which stress.hostile attacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from stress.hostile.corruption import Readers


@contextmanager
def victim(arch: str = "x86_64", cpus: int = 1) -> Iterator[Kernel]:
    """Yield a kernel with two modules, of which one uses the other, and with a client's task."""
    with Kernel(MachineConfig(arch=arch, cpus=cpus, run_budget=0.2)) as kernel:
        kernel.load_module("counter_user")
        with kernel.lock:
            kernel.guest.processes.resident(600, "client")
            yield kernel


def readers(kernel: Kernel) -> Readers:
    """Return the readers that do not run the guest."""
    guest = kernel.guest.kernel
    image = kernel.image
    head = image.kallsyms.lookup_name("modules") or 0
    module = kernel.machine.memory.read_word(head) - image.abi["module.list"]
    text = image.segments[0][0]
    clients = list(kernel.guest.processes)
    return {
        "messages": guest.messages,
        "tasks": guest.tasks,
        "task_structs": lambda: [*guest.task_structs()],
        "cpus": guest.cpus,
        "memory": guest.memory,
        "slabs": guest.slabs,
        "modules": guest.modules,
        "module": lambda: guest.read_module(module),
        "stacks": lambda: guest.in_use_ranges([(text, text + 64)]),
        "context": kernel.tracing.system.tasks.context,
        "queued": lambda: [(guest.cpu_of(task.addr), guest.is_queued(task.addr)) for task in clients],
        "exits": guest.new_exits,
    }
