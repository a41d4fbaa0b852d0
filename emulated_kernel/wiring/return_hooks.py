"""Return hooks put together: shadow stacks know of the guest's tasks, and a symbol of the trampoline."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from emulated_kernel.arch.base import Arch
from emulated_kernel.config import MachineConfig
from emulated_kernel.host.task_list import read_tasks
from emulated_kernel.image.image import KernelImage
from emulated_kernel.kprobes.kretprobe import Kretprobes
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.hooks import ReturnHooks
from emulated_kernel.kprobes.return_hook.ret_stack import RetStack
from emulated_kernel.machine.machine import Machine

COLD_PART = re.compile(r"\.cold(\.\d+)?$")


class HookSets:
    """The return hooks of kretprobes, and a second set for who must have the function graph's."""

    def __init__(self, make: Callable[[str], ReturnHooks], chosen: str) -> None:
        self._make = make
        self.first = make(chosen)
        self._graph: ReturnHooks | None = None
        self.first.is_shared = lambda: self._graph is not None and self._graph.is_used

    def graph(self) -> ReturnHooks:
        """Hooks whose shadow stack is an array for each task."""
        if isinstance(self.first.stack, RetStack):
            return self.first
        if self._graph is None:
            # Who asks the guest for a caller means the first ones' trampoline.
            self.first.install()
            self._graph = self._make(RetStack.name)
        return self._graph

    def look_from(self, area: int) -> None:
        """See ReturnHooks.look_from."""
        for hooks in (self.first, self._graph):
            if hooks is not None:
                hooks.look_from(area)

    def abandon(self) -> None:
        """See ReturnHooks.abandon."""
        for hooks in (self.first, self._graph):
            if hooks is not None:
                hooks.abandon()


def build_kretprobes(
    machine: Machine, image: KernelImage, arch: Arch, kprobes: Kprobes, config: MachineConfig
) -> tuple[Kretprobes, HookSets]:
    """The kretprobes of a kernel, on the return hooks that its profile or its configuration chooses."""
    profile = kprobes.profile

    def all_tasks() -> Iterator[int]:
        return (task.addr for task in read_tasks(machine.memory, image.kallsyms, image.abi))

    def make(stack: str) -> ReturnHooks:
        hooks = ReturnHooks(
            machine,
            image,
            arch,
            cpus=config.cpus,
            stack=stack,
            form=profile.trampoline,
            compiler=kprobes.compiler,
            current_cpu=lambda: machine.cpu,
        )
        hooks.all_tasks = all_tasks
        hooks.look_from(machine.per_cpu_bases[machine.cpu])
        return hooks

    sets = HookSets(make, config.return_hook or profile.return_hook)

    def leave() -> None:
        kprobes.hits.abandon()
        sets.abandon()

    machine.calls.on_leave = leave
    machine.preempt_if(lambda: not sets.first.stack.is_locked)
    machine.on_switch.append(lambda cpu: sets.look_from(machine.per_cpu_bases[cpu]))
    blacklist = _not_returning(image, arch)
    return Kretprobes(kprobes, sets.first, cpus=config.cpus, blacklist=blacklist), sets


def _not_returning(image: KernelImage, arch: Arch) -> list[int]:
    """Functions that switch stacks, and the cold parts of functions, which are jumped to.

    Linux: has only the first on its list, and damages the stack of whoever comes to a hooked cold part.
    """
    return [
        symbol.address
        for symbol in image.kallsyms.symbols
        if symbol.name in arch.no_return_hook or COLD_PART.search(symbol.name)
    ]
