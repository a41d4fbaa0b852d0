"""A check for kernels of all architectures: tasks end while their calls are hooked for return probes."""

from __future__ import annotations

import os

from emulated_kernel.guests.linux.probing.kernel_stacks import KernelStacks
from emulated_kernel.guests.linux.probing.probe_engine import LinuxEngine
from emulated_kernel.kprobes.return_hook.ret_stack import SHADOW_STACK_SIZE
from tests.guests.linux.files import Files
from tests.guests.linux.probing import workload


def check_ended_tasks(guest: LinuxEngine, shell: Files) -> None:
    """Check that exactly the live tasks have a shadow stack while calls are hooked.

    Afterwards no task has a shadow stack.
    """
    stacks = KernelStacks(
        guest.kernel, guest.tasks.machine, guest.machine.memory, guest.tasks.per_cpu, guest.tasks.running
    )
    fields = [
        guest._abi[f"task_struct.{name}"]
        for name in ("rethooks", "ret_stack")
        if f"task_struct.{name}" in guest._abi
    ]
    assert fields

    def hung() -> list[int]:
        return [guest.machine.memory.read_word(task + at) for task in stacks.task_structs() for at in fields]

    # Some of these functions never return.
    for names in ("do_exit", "do_group_exit", "do_task_dead", "vfs_*", "kernel_clone"):
        shell.write("/tracing/set_ftrace_filter", names, os.O_WRONLY | os.O_APPEND)
    shell.write("/tracing/current_tracer", "function_graph")
    shell.write("/kprobe_events", "r:hooked/exits do_exit\nr:hooked/writes vfs_write\n")
    shell.write("/tracing/events/hooked/enable", "1")
    with guest.lock:
        for _ in range(3):
            workload(guest)
        # The kernel frees an ended task once no CPU uses the task.
        guest.tasks.idle(1_000_000)
    live = [*stacks.task_structs()]
    arrays = [word for word in hung() if word]
    assert len(set(arrays)) == len(arrays) == len(live)
    with guest.lock:
        stack = guest.components.engine.hook_sets.graph().stack
    assert stack.shared_memory == len(live) * SHADOW_STACK_SIZE
    shell.write("/tracing/events/hooked/enable", "0")
    shell.write("/tracing/current_tracer", "nop")
    with guest.lock:
        workload(guest)
    assert not any(hung())
    assert stack.shared_memory == 0
    log = shell.read("/machine/dmesg")
    assert "WARN" not in log
    assert "BUG" not in log
