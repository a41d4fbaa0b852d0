"""ReturnHooks: replaces return addresses at function entries, and calls handlers from the trampoline."""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from emulated_kernel.arch.base import Arch
from emulated_kernel.errors import KernelError
from emulated_kernel.kprobes.compiled import CompiledCode, Compiler
from emulated_kernel.kprobes.kprobe import Emit
from emulated_kernel.kprobes.profile import TrampolineForm
from emulated_kernel.kprobes.return_hook.base import MISSED, RETURNED, Pending, ShadowStack
from emulated_kernel.kprobes.return_hook.instances import InstanceTable
from emulated_kernel.kprobes.return_hook.native import NativeReturns
from emulated_kernel.kprobes.return_hook.objpool import ObjpoolStack
from emulated_kernel.kprobes.return_hook.ret_stack import RetStack, UnifiedStack
from emulated_kernel.kprobes.return_hook.rethook import RethookStack
from emulated_kernel.kprobes.return_hook.stack_code import TaskOffsets
from emulated_kernel.kprobes.return_hook.tasks import TaskFields
from emulated_kernel.kprobes.return_hook.trampoline import Trampoline, TrampolineText
from emulated_kernel.kprobes.return_hook.words import GuestWords, PageSource

_log = logging.getLogger(__name__)

SHADOW_STACKS: Mapping[str, type[ShadowStack]] = {
    stack.name: stack for stack in (RethookStack, ObjpoolStack, InstanceTable, RetStack, UnifiedStack)
}
"""By name; the first one is that of Linux 6.1."""


@dataclass(eq=False, slots=True)
class Instance:
    """A call whose return is awaited. Mirrors: struct rethook_node (v6.1)."""

    hook: ReturnHook
    node: int
    """Where it stands in the shadow stack's memory; an address."""
    task: int
    ret_addr: int = 0
    """What was replaced; of several hooks on a function all but one have the trampoline here."""
    frame: int = 0
    """Address of the stack slot."""

    @property
    def data(self) -> memoryview:
        """The hook's private bytes for this call; valid until the return handler has ended."""
        return self.hook.data_of(self.node)


ReturnHandler = Callable[[Instance, Any], None]


@dataclass(eq=False, slots=True)
class ReturnHook:
    """One user of return hooks. Mirrors: struct rethook (v6.1)."""

    address: int
    handler: ReturnHandler
    data_size: int
    stack: ShadowStack
    program: Emit | None = None
    """The handler as guest code; it gets HitWay.RETURN."""
    code: CompiledCode | None = None
    """What was made of it."""
    follows_convention: bool = False
    """Callers of the hooked function expect no more than what the calling convention keeps."""
    place: int = 0
    """Address of the hooked function; 0 for many."""
    flushed: int = 0
    """Calls that never returned, because their task ended or their run was given up."""

    def data_of(self, node: int) -> memoryview:
        return self.stack.data(node, self.data_size)

    @property
    def active(self) -> int:
        """Instances in use."""
        return self.stack.active(self.address)

    @property
    def nodes(self) -> int:
        """Instances that there are; 0 where the tasks' stacks limit them."""
        return self.stack.hooks[self.address]

    @property
    def high_water(self) -> int:
        """The most that ever were."""
        return self.stack.high_water(self.address)

    @property
    def missed(self) -> int:
        """Calls for which none was left."""
        return int(self.stack.counters[self.address][MISSED])

    @property
    def returned(self) -> int:
        """Calls whose return was handled."""
        return int(self.stack.counters[self.address][RETURNED])

    def miss(self) -> None:
        """Count a call as missed."""
        self.stack.counters[self.address][MISSED] += 1

    @property
    def memory(self) -> int:
        """Bytes allocated for it alone."""
        return self.stack.memory_of(self.address)


class HookedMemory(Protocol):
    def read_word(self, va: int, /) -> int: ...

    def read(self, va: int, size: int, /) -> bytes: ...

    def write(self, va: int, data: bytes, /) -> None: ...

    def view(self, va: int, size: int, /) -> memoryview: ...


class HookedMachine(PageSource, Protocol):
    @property
    def memory(self) -> HookedMemory: ...

    @property
    def breakpoints(self) -> dict[int, Callable[[Any], None]]: ...

    @property
    def text(self) -> TrampolineText: ...


class HookedImage(Protocol):
    @property
    def abi(self) -> Mapping[str, int]: ...


class ReturnHooks:
    """All return hooks of one kernel. Callers hold the kernel's control lock.

    Mirrors: kernel/trace/rethook.c (v6.1).
    """

    def __init__(
        self,
        machine: HookedMachine,
        image: HookedImage,
        arch: Arch,
        *,
        cpus: int = 1,
        stack: str = RethookStack.name,
        form: TrampolineForm = TrampolineForm.ASSEMBLY,
        compiler: Compiler | None = None,
        current_cpu: Callable[[], int] = lambda: 0,
    ) -> None:
        """With a `compiler` guest code hooks calls and handles returns."""
        self._memory = machine.memory
        self._text = machine.text
        self._abi = image.abi
        self._arch = arch
        self._cpus = cpus
        self._current_cpu = current_cpu
        self._per_cpu_area = image.abi.get("percpu.base", 0)
        self._breakpoints = machine.breakpoints
        self._words = GuestWords(machine, arch.word_size)
        self._tasks = TaskFields(machine.memory, image.abi, arch.word_size)
        self._hooks: dict[int, ReturnHook] = {}
        self._removed: dict[int, ReturnHook] = {}
        """Those of them that may still have calls pending."""
        self._compiler = compiler
        self.trampoline = Trampoline(machine, arch, form, self._returned)
        self._has_traps = False
        self.is_shared: Callable[[], bool] = lambda: False
        """Whether other hooks use a shadow stack that this may not change to; set by whoever made them."""
        self.all_tasks: Callable[[], Iterable[int]] = lambda: ()
        """Who may need a shadow stack; set by whoever knows tasks."""
        self.stack = self._make_stack(stack)
        self.native = self._make_native()

    # The choice of the shadow stack

    def _make_stack(self, name: str) -> ShadowStack:
        try:
            kind = SHADOW_STACKS[name]
        except KeyError:
            known = ", ".join(SHADOW_STACKS)
            raise KernelError(errno.EINVAL, f"no return hook {name}; there are {known}") from None
        stack = kind(self._words, self._tasks, self._cpus)
        if isinstance(stack, ObjpoolStack):
            stack.current_cpu = self._current_cpu
        return stack

    def return_hooks(self) -> list[str]:
        """Names that `select_return_hook` takes."""
        return list(SHADOW_STACKS)

    @property
    def return_hook(self) -> str:
        """The shadow stack in use."""
        return self.stack.name

    def select_return_hook(self, name: str) -> None:
        """Use another shadow stack from now on.

        Raises: KernelError EINVAL (unknown), EBUSY while a function is hooked or has yet to return.
        """
        stack = self._make_stack(name)
        if self.is_used or self.is_shared():
            raise KernelError(errno.EBUSY, "there are return hooks")
        if self.native is not None:
            self.native.close()
        self.stack.close()
        self.stack = stack
        self.native = self._make_native()

    def _make_native(self) -> NativeReturns | None:
        """What makes guest code for the shadow stack; None where Python does all."""
        arch = self._arch
        offsets = TaskOffsets.of(self._abi, arch.word_size)
        if self._compiler is None or offsets is None or arch.live_at_return is None:
            return None
        code = self.stack.code(offsets)
        return NativeReturns(self.stack, code, self.trampoline, self._compiler, arch)

    # Users

    def add(
        self, handler: ReturnHandler, nodes: int, data_size: int = 0, program: Emit | None = None
    ) -> ReturnHook:
        """Make a hook of which `nodes` calls can be pending at a time, where the shadow stack limits that.

        `program` makes guest code that does what the handler does, where that is possible.
        Raises: KernelError ENOMEM. Mirrors: rethook_alloc, rethook_add_node (v6.1).
        """
        self.install()
        self.stack.give_stacks(self.all_tasks())
        address = self.stack.add_hook(nodes, data_size)
        self._removed = {
            a: hook for a, hook in self._removed.items() if a in self.stack.hooks and a != address
        }
        hook = ReturnHook(address, handler, data_size, self.stack, program)
        self._hooks[address] = hook
        return hook

    def remove(self, hook: ReturnHook) -> None:
        """Its handler isn't called any more; pending calls still return where they belong.

        Mirrors: kernel/trace/rethook.c:rethook_free (v6.1).
        """
        self.handler_changed(hook)
        # No CPU is in code of the hook's when its memory goes. Linux: frees it behind a grace period of RCU.
        self._text.sync()
        self._removed[hook.address] = self._hooks.pop(hook.address)
        self.stack.remove_hook(hook.address)

    def handler_changed(self, hook: ReturnHook) -> None:
        """What its `program` makes differs from now on, or whether it makes any."""
        if self.native is not None:
            self.native.drop_handler(hook)

    def install(self) -> None:
        """Make the trampoline, and answer what the guest asks; once."""
        self.trampoline.install()
        self._install_traps()

    @property
    def is_used(self) -> bool:
        """Whether a function is hooked, or has yet to return."""
        return bool(self.stack.hooks)

    def newest(self, hook: ReturnHook) -> Instance | None:
        """The newest pending call of the current task that this hook has."""
        task = self._tasks.current()
        for call in self.stack.pending(task):
            if call.hook == hook.address:
                return _instance(hook, call, task)
        return None

    def _install_traps(self) -> None:
        """What guest code asks the host; see the image's kernel/rethook.c."""
        abi, breakpoints = self._abi, self._breakpoints
        if "rethook_flush_trap" not in abi or self._has_traps:
            return
        self._has_traps = True
        # Another set of hooks may have theirs there already: a task that ends has to do with both.
        before = breakpoints.get(abi["rethook_flush_trap"])

        def ended(regs: Any) -> None:
            if before is not None:
                before(regs)
            self._task_ended(regs)

        breakpoints[abi["rethook_flush_trap"]] = ended
        if before is not None:
            return
        breakpoints[abi["rethook_find_trap"]] = self._asked_for_caller
        word = self._arch.word_size
        self._memory.write(abi["host_return_trampoline"], self.trampoline.address.to_bytes(word, "little"))
        at = abi.get("host_native_return_trampoline")
        if at is None:
            return
        self.trampoline.on_native = lambda address: self._memory.write(at, address.to_bytes(word, "little"))

    # Function entry

    def try_get(self, hook: ReturnHook) -> Instance | None:
        """An instance for the call that has just begun; None where none is left."""
        task = self._tasks.current()
        node = self.stack.try_get(hook.address, task)
        if not node:
            return None
        instance = Instance(hook, node, task)
        if hook.data_size:
            instance.data[:] = bytes(hook.data_size)
        return instance

    def recycle(self, instance: Instance) -> None:
        """The call isn't hooked after all."""
        self.stack.put_back(instance.hook.address, instance.node)

    def hook(self, instance: Instance, regs: Any) -> None:
        """Let the function that stands at its entry return to the trampoline.

        Raises: MemoryFault where its stack can't be read or written; nothing has changed then.
        Mirrors: arch/x86/kernel/rethook.c:arch_rethook_prepare (v6.1).
        """
        instance.ret_addr, instance.frame = self.trampoline.replace_return_address(regs)
        self.stack.push(
            instance.hook.address, instance.task, instance.node, instance.ret_addr, instance.frame
        )

    # The trampoline

    def _returned(self, regs: Any, frame: int) -> int:
        """Call the handlers of what has returned through `frame`; the real return address, or 0.

        Mirrors: kernel/trace/rethook.c:rethook_trampoline_handler (v6.1).
        """
        task = self._tasks.current()
        calls, caller = self._returning(task)
        if not caller:
            return self._lost(regs, calls)
        regs.ip = caller
        for call in calls:
            if call.frame != frame:
                _log.warning("a hooked function returned with its stack pointer at %#x", frame)
                break
            hook = self._hooks.get(call.hook)
            if hook is not None:
                self.stack.counters[call.hook][RETURNED] += 1
                hook.handler(_instance(hook, call, task), regs)
        self.stack.pop(task, len(calls))
        return caller

    def _returning(self, task: int) -> tuple[list[Pending], int]:
        """The newest calls up to the first whose return address was a real one, and that.

        Mirrors: kernel/trace/rethook.c:__rethook_find_ret_addr (v6.1).
        """
        calls = []
        for call in self.stack.pending(task):
            calls.append(call)
            if not self.trampoline.is_one(call.ret_addr):
                return calls, call.ret_addr
        return calls, 0

    def _lost(self, regs: Any, calls: list[Pending]) -> int:
        """Nobody knows where to go: let the guest say so, and oops.

        Mirrors: the BUG_ON of rethook_trampoline_handler (v6.1), kretprobe_assert (v2.6.33).
        """
        hook = self._hooks.get(calls[0].hook) if calls else None
        told = (self.stack.is_kretprobes, hook.address if hook else 0, hook.place if hook else 0)
        for name, value in zip(self._arch.registers.arguments, told, strict=False):
            setattr(regs, name, int(value))
        return self._abi.get("rethook_bug", 0)

    # Tasks

    def real_return_address(self, task: int, slot: int, address: int) -> int:
        """What a stack slot held before its function was hooked; else `address`, which it holds now.

        Mirrors: kernel/trace/rethook.c:rethook_find_ret_addr (v6.1).
        """
        if not self.trampoline.is_one(address):
            return address
        for call in self.stack.pending(task):
            if call.frame == slot and not self.trampoline.is_one(call.ret_addr):
                return call.ret_addr
        return address

    def flush(self, task: int) -> None:
        """A task has ended: its pending calls never return."""
        for address in self.stack.flush(task):
            self._count_flushed(address)

    def _count_flushed(self, address: int) -> None:
        hook = self._hooks.get(address) or self._removed.get(address)
        assert hook is not None, "a call of a hook that there never was"
        hook.flushed += 1

    def _task_ended(self, regs: Any) -> None:
        self.flush(getattr(regs, self._arch.registers.arguments[0]))

    def _asked_for_caller(self, regs: Any) -> None:
        task, slot = (getattr(regs, name) for name in self._arch.registers.arguments[:2])
        setattr(
            regs,
            self._arch.registers.return_value,
            self.real_return_address(task, slot, self.trampoline.address),
        )

    def look_from(self, area: int) -> None:
        """The CPU with this per-CPU area is the current one."""
        self._per_cpu_area = area
        self._tasks.look_from(area)

    def abandon(self) -> None:
        """A run on a stack of the host's was given up: what it had hooked never returns."""
        if not self.stack.hooks or "task_struct.stack" not in self._abi:
            return
        task = self._tasks.current()
        low = self._memory.read_word(task + self._abi["task_struct.stack"])
        top = self._memory.read_word(self._per_cpu_area + self._abi["percpu.hardirq_stack_ptr"])
        size = self._abi["thread.size"]
        for call in list(self.stack.pending(task)):
            if low <= call.frame < low + size or top - size <= call.frame < top:
                break
            self.stack.pop(task, 1)
            self._count_flushed(call.hook)


def _instance(hook: ReturnHook, call: Pending, task: int) -> Instance:
    return Instance(hook, call.node, task, call.ret_addr, call.frame)
