"""ReturnHooks: replaces return addresses at function entries, and calls handlers from the trampoline."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import dropwhile
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.kprobes.codegen.asm_handlers import HandlerPoint
from emulated_kernel.kprobes.kprobe import CompileHandler
from emulated_kernel.kprobes.profile import RETURN_HOOKS, TrampolineForm
from emulated_kernel.kprobes.quiescence import GracePeriod
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.return_hook.compiled_returns import NativeReturns
from emulated_kernel.kprobes.return_hook.guest_heap import GuestHeap, TaskFields
from emulated_kernel.kprobes.return_hook.kretprobe_inst_table import InstancesCode, KretprobeInstTable
from emulated_kernel.kprobes.return_hook.objpool import ObjpoolCode, ObjpoolStack
from emulated_kernel.kprobes.return_hook.ret_stack import RetStack, RetStackCode, UnifiedStack
from emulated_kernel.kprobes.return_hook.rethook import RethookCode, RethookStack
from emulated_kernel.kprobes.return_hook.return_hook import RethookNode, ReturnHandler, ReturnHook
from emulated_kernel.kprobes.return_hook.shadow_stack import RETURNED, Pending, ShadowStack, count
from emulated_kernel.kprobes.return_hook.stack_code import StackCode, TaskOffsets
from emulated_kernel.kprobes.return_hook.trampoline import Trampoline
from emulated_kernel.machine.probed_machine import ProbedMachine
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.errors import KernelError

_log = logging.getLogger(__name__)

_CODES: Mapping[type[ShadowStack], type[StackCode[Any]]] = {
    RethookStack: RethookCode,
    ObjpoolStack: ObjpoolCode,
    KretprobeInstTable: InstancesCode,
    RetStack: RetStackCode,
    UnifiedStack: RetStackCode,
}
"""Class of a shadow stack -> class that emits guest code for it."""
_BY_NAME = {stack.name: stack for stack in _CODES}
SHADOW_STACKS: Mapping[str, type[ShadowStack]] = {name: _BY_NAME[name] for name in RETURN_HOOKS}


class ReturnHooks:
    """The return hooks of one kernel that use the same shadow stack.

    Mirrors: kernel/trace/rethook.c (v6.1).
    """

    def __init__(
        self,
        machine: ProbedMachine,
        abi: Mapping[str, int],
        arch: Arch,
        kprobes: Kprobes,
        scheduler: GracePeriod,
        sets: list[ReturnHooks],
        *,
        stack: str,
        form: TrampolineForm,
        place: int | None,
    ) -> None:
        """Create the object and add it to `sets`, the list of the kernel's ReturnHooks.

        `stack`: name of the shadow stack, a key of SHADOW_STACKS. `form`: form of the trampoline. `place`:
        see Trampoline.
        """
        self._machine = machine
        self._memory = machine.memory
        self._abi = abi
        self._arch = arch
        self._compiler = kprobes.compiler
        self._hits = kprobes.hits
        self._scheduler = scheduler
        self._lock = kprobes.lock
        self._sets = sets
        self._breakpoints = machine.breakpoints
        self._words = GuestHeap(machine, arch.word_size)
        self._tasks = TaskFields(machine.memory, abi, arch.word_size, machine.running_task)
        self._hooks: dict[int, ReturnHook] = {}
        self._removed: dict[int, ReturnHook] = {}
        """Address of a removed hook -> the hook. The map has only hooks that may still have pending calls."""
        self._has_assembly: bool | None = None
        """Whether a hook has handlers in assembly; None if that must be determined at the next return."""
        self.trampoline = Trampoline(machine, abi, arch, form, self._returned, self._run_asm_handlers, place)
        self._has_traps = False
        self.stack = self._make_stack(stack)
        self.native = self._make_native()
        sets.append(self)
        self.look_from(machine.cpu)

    # Selection of the shadow stack

    def _make_stack(self, name: str) -> ShadowStack:
        try:
            kind = SHADOW_STACKS[name]
        except KeyError:
            known = ", ".join(SHADOW_STACKS)
            raise KernelError(errno.EINVAL, f"no return hook {name!r}; there are {known}") from None
        stack = kind(self._words, self._tasks, len(self._machine.per_cpu_bases))
        stack.damage = self._machine.damage
        return stack

    @property
    def return_hook(self) -> str:
        """Name of the shadow stack in use, a key of SHADOW_STACKS."""
        return self.stack.name

    def select_return_hook(self, name: str) -> None:
        """Use the shadow stack called `name`, a key of SHADOW_STACKS, from now on.

        Raises: KernelError EINVAL (unknown name), EBUSY (a ReturnHooks of the kernel is in use; see
        `is_used`).
        """
        self._lock.assert_held()
        stack = self._make_stack(name)
        if any(hooks.is_used for hooks in self._sets):
            told = "in use; remove all return probes, also disabled ones, and switch fprobes and graphs off"
            raise KernelError(errno.EBUSY, told)
        if self.native is not None:
            self.native.close()
        self.stack.close()
        self.stack = stack
        self.native = self._make_native()

    def _make_native(self) -> NativeReturns | None:
        """Return the emitter of guest code for the shadow stack; None if Python must hook all calls."""
        arch = self._arch
        offsets = TaskOffsets.of(self._abi, arch)
        kind = _CODES[type(self.stack)]
        if offsets is None or arch.returns is None:
            return None
        if kind.needs_field and not offsets.field(self.stack.field):
            return None
        code = kind(offsets, self.stack, arch.returned_at)
        in_turn = not self._shows_caller
        return NativeReturns(self.stack, code, self.trampoline, self._compiler, arch, returns_in_turn=in_turn)

    # Users

    def add(
        self, handler: ReturnHandler, nodes: int, data_size: int = 0, program: CompileHandler | None = None
    ) -> ReturnHook:
        """Return a new hook, whose `handler` is called at the returns of the calls that it hooks.

        `nodes`: maximum number of calls that can be pending at a time, if the shadow stack has such a limit.
        `data_size`: size in bytes of the private data of a call. `program`: emits guest code that does the
        same as the handler; None: only Python handles returns.
        Raises: KernelError ENOMEM.
        Mirrors: kernel/trace/rethook.c:rethook_alloc, rethook_add_node (v6.1).
        """
        self._lock.assert_held()
        self.install()
        if not self.stack.hooks:
            # Later tasks get their stack at their first call. Listing the tasks takes most of the time here.
            self.stack.give_stacks(self._scheduler.tasks())
        address = self.stack.add_hook(nodes, data_size)
        self._removed.pop(address, None)
        hook = ReturnHook(address, handler, data_size, self.stack, program)
        self._hooks[address] = hook
        self._has_assembly = None
        return hook

    def remove(self, hook: ReturnHook) -> None:
        """Stop calling a hook's handler. Pending calls still return to their callers.

        Mirrors: kernel/trace/rethook.c:rethook_free (v6.1).
        """
        self._lock.assert_held()
        self.handler_changed(hook)
        # No CPU may be in the hook's code when its memory is freed.
        # Linux frees it after an RCU grace period.
        self._machine.text.sync()
        del self._hooks[hook.address]
        self.stack.remove_hook(hook.address)
        if hook.address in self.stack.hooks:
            pending = {at: removed for at, removed in self._removed.items() if at in self.stack.hooks}
            self._removed = {**pending, hook.address: hook}

    def handler_changed(self, hook: ReturnHook) -> None:
        """Drop the guest code of a hook, because its `program` or its handlers in assembly have changed."""
        self._lock.assert_held()
        self._has_assembly = None
        if hook.assembled is not None:
            self._compiler.drop_asm_thunks(hook)
        if self.native is not None:
            self.native.drop_handler(hook)

    def install(self) -> None:
        """Create the trampoline and register the handlers of its traps, unless this was done before."""
        self.trampoline.install()
        self._install_traps()

    @property
    def is_used(self) -> bool:
        """Whether there is a hook, or a call of a removed hook has not returned yet.

        A disabled return probe has a hook, too: its registration allocates the nodes of the hook.
        """
        return bool(self.stack.hooks)

    def newest(self, hook: ReturnHook, before: int | None = None) -> RethookNode | None:
        """Return the current task's newest pending call that `hook` has hooked, or None without such a call.

        `before`: address of the node of a call; only calls that are older than that call are considered.
        """
        task = self._tasks.current()
        for call in self.stack.pending(task):
            if before is None and call.hook == hook.address:
                return _instance(hook, call, task)
            if call.node == before:
                before = None
        return None

    def _install_traps(self) -> None:
        """Register handlers of the guest's traps for ended tasks and for unwinders at the trampoline.

        kernel/rethook.c of kprobefs's own kernel has these traps. For another kernel, do nothing.
        """
        abi = self._abi
        breakpoints = self._breakpoints
        if "rethook_flush_trap" not in abi or self._has_traps:
            return
        self._has_traps = True
        # Another set of hooks may handle the trap already; the end of a task concerns both sets.
        before = breakpoints.get(abi["rethook_flush_trap"])

        def ended(regs: Any) -> None:
            if before is not None:
                before(regs)
            self._task_ended(regs)

        breakpoints[abi["rethook_flush_trap"]] = ended
        if before is not None:
            return
        breakpoints[abi["rethook_find_trap"]] = self._on_find_ret_addr
        self.trampoline.notify_guest()

    # Function entry

    def hook_call(self, hook: ReturnHook, regs: Any, wants: Callable[[Any, Any], bool] | None = None) -> bool:
        """Replace the return address at the entry of a function by the trampoline: hook this call.

        `regs`: the registers at the entry. `wants(instance, regs)`: returns False if the call must not be
        hooked; None: every call is hooked. `instance` is the call as an object of the hook's `node_type`. If
        no node is free, or the return address cannot be replaced, count a missed call and return False.
        Otherwise return True, also if `wants` has returned False.
        Mirrors: kernel/trace/rethook.c:rethook_try_get, rethook_hook, kernel/trace/fgraph.c:
        function_graph_enter, which reserves the entry before it calls the entry functions (v6.1).
        """
        stack = self.stack
        task = self._tasks.current()
        node = stack.try_get(hook.address, task)
        if not node:
            hook.miss()
            return False
        if wants is not None or hook.data_size:
            instance = hook.node_type(hook, node, task)
            if hook.data_size:
                instance.data[:] = bytes(hook.data_size)
            if wants is not None and not wants(instance, regs):
                stack.put_back(hook.address, task, node)
                return True
        try:
            ret_addr, frame = self.trampoline.replace_return_address(regs)
        except MemoryFault:
            # Linux: the write to the stack faults in the handler.
            # Deviates: if the stack cannot be written, the call only counts as missed.
            stack.put_back(hook.address, task, node)
            hook.miss()
            return False
        stack.push(hook.address, task, node, ret_addr, frame)
        return True

    # The trampoline

    def _returned(self, regs: Any, frame: int) -> int:
        """Call the handlers of all calls that return through the stack slot at `frame`.

        Return the address at which the guest continues. If no real return address is known, see _lost().

        Mirrors: kernel/trace/rethook.c:rethook_trampoline_handler (v6.1).
        """
        task = self._tasks.current()
        calls, caller = self._returning(task)
        if not caller:
            return self._lost(regs, calls)
        regs.ip = caller
        shows_caller = len(calls) > 1 and self._shows_caller
        for call in calls:
            if call.frame != frame:
                _log.warning("a hooked function returned with its stack pointer at %#x", frame)
                break
            hook = self._hooks.get(call.hook)
            if hook is not None:
                count(self.stack.counters[call.hook], RETURNED, 1)
                shown = call._replace(ret_addr=caller) if shows_caller else call
                hook.handler(_instance(hook, shown, task), regs)
        self.stack.pop(task, len(calls))
        return caller

    @property
    def _shows_caller(self) -> bool:
        """Whether the handlers of all hooks of a returning call get the real return address.

        If False, only the handler of the call's oldest hook gets it; the other handlers get the trampoline's
        address. The value is True with the shadow stack KretprobeInstTable, except in a distribution's kernel
        with rethooks. It is False with all other shadow stacks.
        Mirrors: kernel/kprobes.c:__kretprobe_trampoline_handler, kernel/trace/rethook.c (v6.12).
        """
        has_rethooks = "task_struct.rethooks" in self._abi and "rethook_flush_trap" not in self._abi
        return isinstance(self.stack, KretprobeInstTable) and not has_rethooks

    def _run_asm_handlers(
        self, regs: Any, frame: int, /, *, in_frame: bool, on_return: Callable[[Any], object]
    ) -> bool:
        """Run in the guest the assembly handlers of the hooked calls that return now.

        When the handlers have ended, call `on_return` with the registers. Return False if there are no such
        handlers, or no room for their code; then `on_return` is not called. `frame` is the address of the
        stack slot whose return address was replaced for these calls. `in_frame`: the registers are saved in a
        struct pt_regs at sp; if False, they are the CPU's own.
        """
        if self._has_assembly is None:
            self._has_assembly = any(hook.assembled is not None for hook in self._hooks.values())
        if not self._has_assembly:
            return False
        calls, _ = self._returning(self._tasks.current())
        found = (self._hooks.get(call.hook) for call in calls if call.frame == frame)
        owners = tuple(hook for hook in found if hook is not None and hook.assembled is not None)
        return bool(owners) and self._hits.asm_thunks.run_asm_handlers(
            owners, HandlerPoint.RETURN, regs, in_frame=in_frame, on_return=on_return
        )

    def _returning(self, task: int) -> tuple[list[Pending], int]:
        """Return the task's calls from the newest to the first with a real return address, and this address.

        A return address is real if it is not a trampoline's. If no call has a real return address, return all
        pending calls and the address 0.

        Mirrors: kernel/trace/rethook.c:__rethook_find_ret_addr (v6.1).
        """
        calls = []
        for call in self.stack.pending(task):
            calls.append(call)
            if not self.trampoline.is_one(call.ret_addr):
                return calls, call.ret_addr
        return calls, 0

    def _lost(self, regs: Any, calls: list[Pending]) -> int:
        """Set the arguments of the guest function that reports an unknown return address and oopses.

        Return the address of this function, at which the guest continues, or 0 if the image lacks the
        function. `calls`: the task's pending calls.
        Mirrors: the BUG_ON of rethook_trampoline_handler (v6.1), kretprobe_assert (v2.6.33).
        """
        hook = self._hooks.get(calls[0].hook) if calls else None
        arguments = (self.stack.is_kretprobes, hook.address if hook else 0, hook.place if hook else 0)
        for name, value in zip(self._arch.registers.arguments, arguments, strict=False):
            setattr(regs, name, int(value))
        return self._abi.get("rethook_bug", 0)

    # Tasks

    def real_return_address(self, task: int, slot: int, address: int) -> int:
        """Return the content that a task's stack slot had before the call was hooked.

        `slot`: address of the stack slot. `address`: the slot's present content. If no hook has replaced the
        content, return `address`.
        Mirrors: kernel/trace/rethook.c:rethook_find_ret_addr (v6.1).
        """
        if not self.trampoline.is_one(address):
            return address
        for call in self.stack.pending(task):
            if call.frame == slot and not self.trampoline.is_one(call.ret_addr):
                return call.ret_addr
        return address

    def replaced_by_others(self, hook: ReturnHook) -> int:
        """Return the address that hooks without a return probe replaced in the returning call's stack slot.

        Such hooks, for example those of fprobes, replace the address only once for all of them. The result is
        the real return address, or the trampoline's address if a return probe had hooked the call before.
        Return 0 if the address is not known.

        `hook`: a hook without a return probe. Only its return handler may call this method.
        """
        older = dropwhile(lambda call: call.hook != hook.address, self.stack.pending(self._tasks.current()))
        for call in older:
            owner = self._hooks.get(call.hook)
            if owner is not None and owner.probe is not None:
                return self.trampoline.address
            if not self.trampoline.is_one(call.ret_addr):
                return call.ret_addr
        return 0

    def replaced(self, slot: int) -> Iterator[int]:
        """Yield the addresses that hooks have replaced in a stack slot, newest first.

        During a task switch the stack may belong to a task that is not current yet, so all tasks are
        searched.
        """
        for task in self._nearest_tasks():
            calls = [call.ret_addr for call in self.stack.pending(task) if call.frame == slot]
            if calls:
                yield from calls
                return

    def slots(self) -> Iterator[int]:
        """Yield the addresses of the stack slots of all tasks' pending calls."""
        return (call.frame for task in self._nearest_tasks() for call in self.stack.pending(task))

    def _nearest_tasks(self) -> Iterator[int]:
        """Yield the addresses of all task_structs, the current task's first.

        The other tasks are listed only when the caller asks for the second address, because this is slow and
        seldom needed. If there are no hooks, yield only the current task's address.
        """
        current = self._tasks.current()
        yield current
        if self.stack.hooks:
            yield from (task for task in self._scheduler.tasks() if task != current)

    def flush(self, task: int) -> None:
        """Remove the pending calls of a task that has ended; they never return."""
        for address in self.stack.flush(task):
            self._count_flushed(address)
        self._tasks.ended(task)

    def drop(self, task: int) -> None:
        """Remove all pending calls of a living task, because they will never return.

        The calls are counted as flushed, and their return handlers are not called. Return addresses on the
        stack are not restored.
        """
        for address in self.stack.drop(task):
            self._count_flushed(address)

    def _count_flushed(self, address: int) -> None:
        hook = self._hooks.get(address) or self._removed.get(address)
        assert hook is not None, "a pending call belongs to an unknown hook"
        hook.flushed += 1

    def _task_ended(self, regs: Any) -> None:
        self.flush(getattr(regs, self._arch.registers.arguments[0]))

    def _on_find_ret_addr(self, regs: Any) -> None:
        task, slot = (getattr(regs, name) for name in self._arch.registers.arguments[:2])
        setattr(
            regs,
            self._arch.registers.return_value,
            self.real_return_address(task, slot, self.trampoline.address),
        )

    def look_from(self, cpu: int) -> None:
        """Make `cpu` the current CPU: calls are hooked for the task that runs there."""
        self._tasks.look_from(cpu, self._machine.per_cpu_bases[cpu])

    def abandon(self) -> None:
        """Remove the hooked calls within a guest function that the host has called and does not continue."""
        if not self.stack.hooks or "task_struct.stack" not in self._abi:
            return
        with self._machine.damage.left_out("current task"):
            self._abandon(self._tasks.current())

    def _abandon(self, task: int) -> None:
        """Remove a task's newest hooked calls whose frames are on no stack that the task can use.

        The task can use its own stack and the current CPU's interrupt stack.
        Raises: MemoryFault (the guest has damaged the data of its tasks).
        """
        low = self._memory.read_word(task + self._abi["task_struct.stack"])
        area = self._machine.per_cpu_bases[self._machine.cpu]
        top = self._memory.read_word(area + self._abi["percpu.hardirq_stack_ptr"])
        size = self._abi["thread.size"]
        self._drop_until(task, lambda frame: low <= frame < low + size or top - size <= frame < top)

    def abandon_below(self, sp: int) -> None:
        """Remove the current task's newest hooked calls whose frames are not above `sp`."""
        if self.stack.hooks:
            self._drop_until(self._tasks.current(), lambda frame: frame > sp)

    def _drop_until(self, task: int, stays: Callable[[int], bool]) -> None:
        """Remove a task's newest pending calls, and count them as flushed, up to the first call that stays.

        `stays(frame)`: returns True if the call whose stack slot is at `frame` stays.
        """
        for call in list(self.stack.pending(task)):
            if stays(call.frame):
                break
            self.stack.pop(task, 1)
            self._count_flushed(call.hook)


def _instance(hook: ReturnHook, call: Pending, task: int) -> RethookNode:
    return hook.node_type(hook, call.node, task, call.ret_addr, call.frame)
