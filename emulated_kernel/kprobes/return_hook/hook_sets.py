"""Return hooks put together: shadow stacks know of the guest's tasks, and a symbol of the trampoline."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import partial

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.kprobes.quiescence import GracePeriod
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.ret_stack import RetStack
from emulated_kernel.kprobes.return_hook.return_hooks import ReturnHooks
from emulated_kernel.kprobes.return_hook.trampoline import Trampoline
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.task_events import TaskObserver

RETHOOK_TRAMPOLINE = "arch_rethook_trampoline"
GRAPH_TRAMPOLINE = "return_to_handler"
_COLD = r"\.cold(\.\d+)?"
COLD_PART = re.compile(f"{_COLD}$")


class HookSets(TaskObserver):
    """The return hooks of kretprobes, and a second set for who must have the function graph's.

    A CPU isn't preempted while guest code on it holds a shadow stack's lock, which Python can't wait for.
    """

    def __init__(
        self,
        machine: ProbedMachine,
        abi: Mapping[str, int],
        arch: Arch,
        kprobes: Kprobes,
        scheduler: GracePeriod,
        chosen: str | None,
    ) -> None:
        """`chosen` names a shadow stack that goes before the profile's."""
        self._hits = kprobes.hits
        self._sets: list[ReturnHooks] = []
        self._make = partial(ReturnHooks, machine, abi, arch, kprobes, scheduler, self._sets)
        self.first = self._make(stack=chosen or kprobes.profile.return_hook)
        self._graph: ReturnHooks | None = None
        machine.on_leave.append(self._abandon)
        machine.preempt_if(lambda: not self.first.stack.is_locked)
        machine.on_switch.append(self._look_from)

    def graph(self) -> ReturnHooks:
        """Hooks whose shadow stack is an array for each task."""
        if isinstance(self.first.stack, RetStack):
            return self.first
        if self._graph is None:
            # Who asks the guest for a caller means the first ones' trampoline.
            self.first.install()
            self._graph = self._make(stack=RetStack.name)
        return self._graph

    def real_return_address(self, slot: int, address: int) -> int:
        """What a stack slot that holds `address` would hold but for hooks.

        Functions that share it, for the one has jumped to the other, may be hooked by one set and by another
        in turns. Mirrors: kernel/trace/rethook.c:rethook_find_ret_addr (v6.1).
        """
        replaced = [(hooks.trampoline.is_one, hooks.replaced(slot)) for hooks in self._sets]
        found = address
        while True:
            calls = next((calls for is_one, calls in replaced if is_one(found)), None)
            if calls is None:
                return found
            before = next(calls, None)
            if before is None:
                return address
            found = before

    def trampolines(self) -> Iterator[tuple[str, Trampoline]]:
        """Where hooked functions return to, by the names that Linux has for them."""
        for hooks in self._sets:
            yield (RETHOOK_TRAMPOLINE if hooks is self.first else GRAPH_TRAMPOLINE), hooks.trampoline

    def freed(self, task: int) -> None:
        """Its pending calls never return. For a kernel that doesn't say so itself."""
        for hooks in self._sets:
            hooks.flush(task)

    def drop(self, task: int) -> None:
        """It goes on as if it had made none of its pending calls."""
        for hooks in self._sets:
            hooks.drop(task)

    def _look_from(self, cpu: int) -> None:
        for hooks in self._sets:
            hooks.look_from(cpu)

    def _abandon(self) -> None:
        """A run on a stack of the host's has ended: what it hits and hooks doesn't go on."""
        self._hits.ctlblk.abandon()
        for hooks in self._sets:
            hooks.abandon()


def never_returning(image: ProbedTables, arch: Arch) -> list[int]:
    """Functions that switch stacks, and the cold parts of functions, which are jumped to.

    Linux: has only the first on its list, and damages the stack of a task that runs into a hooked cold part.
    """
    symbols = image.kallsyms
    named = (symbol.address for name in arch.no_return_hook for symbol in symbols.by_name(name))
    return [*named, *symbols.ending(_COLD)]
