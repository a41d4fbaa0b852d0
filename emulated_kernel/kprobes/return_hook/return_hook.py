"""ReturnHook: one user of the return hooks; RethookNode: one call whose return it awaits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any

from emulated_kernel.kprobes.codegen.asm_handlers import AssembledHandlers, AssemblyOwner
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode
from emulated_kernel.kprobes.kprobe import CompileHandler, Kprobe
from emulated_kernel.kprobes.return_hook.shadow_stack import MISSED, RETURNED, ShadowStack
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass


@dataclass(eq=False, slots=True)
class RethookNode:
    """One call of a hooked function, from its entry to its return.

    Mirrors: include/linux/rethook.h:struct rethook_node (v6.1).
    """

    hook: ReturnHook
    node: int = field(metadata=ADDRESS)
    """Where it stands in the shadow stack's memory; an address."""
    task: int = field(metadata=ADDRESS)
    ret_addr: int = field(default=0, metadata=ADDRESS)
    """What was replaced; of several hooks on a function all but one have the trampoline here."""
    frame: int = field(default=0, metadata=ADDRESS)
    """Address of the stack slot."""

    @property
    def data(self) -> memoryview:
        """The call's own data; valid until the return handler has ended."""
        return self.hook.data_of(self.node)

    @property
    def data_address(self) -> int:
        """Where they are in guest memory."""
        return self.hook.stack.data_address(self.node)

    @property
    def rp(self) -> Kprobe | None:
        """The return probe of this call, or None for other return hooks.

        Mirrors: include/linux/kprobes.h:get_kretprobe (v6.1).
        """
        return self.hook.probe


ReturnHandler = Callable[[RethookNode, Any], None]


@dataclass(eq=False, slots=True)
class ReturnHook(AssemblyOwner):
    """One user of return hooks. Mirrors: struct rethook (v6.1)."""

    address: int = field(metadata=ADDRESS)
    handler: ReturnHandler
    data_size: int
    stack: ShadowStack
    program: CompileHandler | None = None
    """The handler as guest code; it gets EntryKind.RETURN."""
    code: CompiledCode | None = None
    """What was made of it."""
    follows_convention: bool = False
    """Callers of the hooked function expect no more than what the calling convention keeps."""
    probe: Kprobe | None = None
    """The return probe that it belongs to."""
    place: int = field(default=0, metadata=ADDRESS)
    """Address of the hooked function; 0 for many."""
    assembled: AssembledHandlers | None = None
    """Handlers in assembly that run at its returns."""
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
        """Calls for which none was left, and returns without their handlers in assembly."""
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
