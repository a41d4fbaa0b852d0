"""HookSets: the return hooks of a kernel, connected to the guest's tasks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.image.text_tables import ProbedTables
from emulated_kernel.kprobes.profile import TrampolineForm
from emulated_kernel.kprobes.quiescence import GracePeriod
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.ret_stack import RetStack
from emulated_kernel.kprobes.return_hook.return_hooks import ReturnHooks
from emulated_kernel.kprobes.return_hook.trampoline import Trampoline
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.task_events import TaskObserver
from emulated_kernel.util.lazy_pattern import lazy_pattern

RETHOOK_TRAMPOLINE = "arch_rethook_trampoline"
GRAPH_TRAMPOLINE = "return_to_handler"
RETURN_PLACE = "return_place"
"""Key in the ABI table: address of unused bytes in the kernel's text to which hooked functions return."""
_COLD = r"\.cold(\.\d+)?"
COLD_PART = lazy_pattern(f"{_COLD}$")


class HookSets(TaskObserver):
    """At most two sets of return hooks: `first`, for kretprobes, and graph(), which uses a RetStack.

    A CPU is not preempted while its guest code holds a shadow stack's lock, because Python cannot wait for
    the lock.
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
        """Make the first set of return hooks, and register callbacks with `machine`.

        `chosen` is the name of a shadow stack to use instead of the profile's; None: use the profile's.
        """
        self._arch = arch
        self._hits = kprobes.hits
        self._sets: list[ReturnHooks] = []
        self._make = partial(ReturnHooks, machine, abi, arch, kprobes, scheduler, self._sets)
        profile = kprobes.profile
        self._place = abi.get(RETURN_PLACE)
        self.first = self._make(
            stack=chosen or profile.return_hook, form=profile.trampoline, place=self._place
        )
        self._graph: ReturnHooks | None = None
        machine.on_leave.append(self._abandon)
        machine.on_give_up.append(self._give_up)
        machine.preempt_if(lambda: not self.first.stack.is_locked)
        machine.on_switch.append(self._look_from)

    def graph(self) -> ReturnHooks:
        """Return the hooks whose shadow stack is a RetStack (an array per task); create them if necessary."""
        if isinstance(self.first.stack, RetStack):
            return self.first
        if self._graph is None:
            # Guest code that asks for a caller means the trampoline of the first set, so install that one.
            self.first.install()
            # Linux: return_to_handler is code on all architectures.
            place = None if self._place is None else self._place + return_place_size(self._arch, 1)
            self._graph = self._make(stack=RetStack.name, form=TrampolineForm.ASSEMBLY, place=place)
        return self._graph

    def real_return_address(self, slot: int, address: int) -> int:
        """Return the address that a stack slot would contain without hooks; `address` is its present content.

        If a hooked function jumps to another one, both share a slot. Then hooks of both sets may have
        replaced the slot's content one after the other.
        Mirrors: kernel/trace/rethook.c:rethook_find_ret_addr (v6.1).
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

    def caller_near(self, pointer: int, address: int) -> int:
        """Return the real return address of a call, for the kernel's own unwinder.

        `pointer`: see Arch.hooked_slot(). `address`: the address to which the call returns. If no hook has
        replaced it, return `address`.
        Mirrors: kernel/trace/fgraph.c:ftrace_graph_ret_addr (v6.1).
        """
        if not any(hooks.trampoline.is_one(address) for hooks in self._sets):
            return address
        slot = self._arch.hooked_slot(pointer, (slot for hooks in self._sets for slot in hooks.slots()))
        return address if slot is None else self.real_return_address(slot, address)

    def trampolines(self) -> Iterator[tuple[str, Trampoline]]:
        """Yield (name, trampoline) for each set of hooks; `name` is the symbol of Linux's trampoline."""
        for hooks in self._sets:
            yield (RETHOOK_TRAMPOLINE if hooks is self.first else GRAPH_TRAMPOLINE), hooks.trampoline

    def freed(self, task: int) -> None:
        """Discard the hooked calls from which an ended task never returned.

        `task`: address of the task_struct, which the guest has freed. The built-in guest does not need this
        method, because its rethook_flush_task() traps to the host.
        """
        for hooks in self._sets:
            hooks.flush(task)

    def drop(self, task: int) -> None:
        """Remove all pending calls of a task, because they will never return; see ReturnHooks.drop()."""
        for hooks in self._sets:
            hooks.drop(task)

    def _look_from(self, cpu: int) -> None:
        for hooks in self._sets:
            hooks.look_from(cpu)

    def _abandon(self) -> None:
        """Forget hits and hooked calls within a guest function that the host called and does not continue."""
        self._hits.ctlblk.abandon()
        for hooks in self._sets:
            hooks.abandon()

    def _give_up(self, sp: int) -> None:
        """Forget the hooked calls within a guest function that a handler called and that did not return.

        `sp`: stack pointer at the function's entry.
        """
        for hooks in self._sets:
            hooks.abandon_below(sp)


def return_place_size(arch: Arch, sets: int = 2) -> int:
    """Return the number of bytes at RETURN_PLACE that the trampolines of `sets` sets of hooks use."""
    return sets * (arch.call_size + len(arch.breakpoint))


def never_returning(image: ProbedTables, arch: Arch) -> list[int]:
    """Return the addresses of functions whose returns cannot be hooked.

    Such a function switches stacks, or is a cold part: code to which other functions jump. If a cold part
    were hooked, the stack of a task that jumps to it would be damaged. Linux rejects only the functions that
    switch stacks.
    """
    symbols = image.kallsyms
    # A module's function may have the same name.
    named = [
        symbol.address
        for name in arch.no_return_hook
        for symbol in symbols.by_name(name)[: symbols.count_in_kernel(name)]
    ]
    return [*named, *symbols.ending(_COLD)]
