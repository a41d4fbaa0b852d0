"""ReturnHook: one user of return hooks; RethookNode: one call whose return is pending."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.codegen.asm_handlers import AssembledHandlers, AssemblyOwner, HandlerPoint
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode
from emulated_kernel.kprobes.kprobe import CompileHandler, Kprobe
from emulated_kernel.kprobes.return_hook.shadow_stack import MISSED, RETURNED, ShadowStack, count
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass, field


@dataclass(eq=False, slots=True)
class RethookNode:
    """One call of a hooked function, from its entry to its return.

    Mirrors: include/linux/rethook.h:struct rethook_node (v6.1).
    """

    hook: ReturnHook
    node: int = field(metadata=ADDRESS)
    """Address of the call's node in the memory of the shadow stack."""
    task: int = field(metadata=ADDRESS)
    """Address of the task's struct task_struct."""
    ret_addr: int = field(default=0, metadata=ADDRESS)
    """Address to which the function returns.

    If several hooks have hooked the call, only the oldest hook's node is sure to have this address. The
    others may have the address of a trampoline.
    """
    frame: int = field(default=0, metadata=ADDRESS)
    """Address of the stack slot that contained the return address."""

    @property
    def data(self) -> memoryview:
        """Live view of the call's own data, valid until the return handler has ended."""
        return self.hook.data_of(self.node)

    @property
    def data_address(self) -> int:
        """Guest address of `data`."""
        return self.hook.stack.data_address(self.node)


ReturnHandler = Callable[[Any, Any], None]
"""Function that handles the return of a hooked function. It takes two arguments.

The first argument is the call, as an object of the hook's `node_type`. The second argument is the registers
at the return.
"""


@dataclass(eq=False, slots=True)
class ReturnHook(AssemblyOwner):
    """A user of return hooks, such as a return probe: its handler runs when a hooked call returns.

    Mirrors: include/linux/rethook.h:struct rethook (v6.1).
    """

    address: int = field(metadata=ADDRESS)
    handler: ReturnHandler
    data_size: int
    stack: ShadowStack
    program: CompileHandler | None = None
    """Function that emits the handler as guest code, for EntryKind.RETURN.

    None if only Python can handle returns.
    """
    code: CompiledCode | None = None
    """The handler compiled to guest code; None if it is not compiled."""
    follows_convention: bool = False
    """Whether callers of the hooked function rely only on registers that the calling convention preserves."""
    node_type: type[RethookNode] = RethookNode
    """Class of the objects that handlers get for a call."""
    probe: Kprobe | None = None
    """The return probe that owns the hook; None if another object owns it."""
    place: int = field(default=0, metadata=ADDRESS)
    """Address of the hooked function; 0 if the hook serves several functions."""
    assembled: AssembledHandlers | None = None
    """The handlers in assembly that run at returns; None if there are none."""
    missed_at: int = field(default=0, metadata=ADDRESS)
    """Address of a 32-bit guest variable that each missed call sets to `missed`; 0 if there is none."""
    flushed: int = 0
    """Number of calls that never returned: their task ended, or the host gave up the code that made them."""

    def data_of(self, node: int) -> memoryview:
        return self.stack.data(node, self.data_size)

    @property
    def active(self) -> int:
        """Number of nodes in use."""
        return self.stack.active(self.address)

    @property
    def nodes(self) -> int:
        """Number of nodes, which limits the pending calls; 0 if only the tasks' arrays limit them."""
        return self.stack.hooks[self.address]

    @property
    def high_water(self) -> int:
        """Highest number of nodes that were in use at the same time."""
        return self.stack.high_water(self.address)

    @property
    def missed(self) -> int:
        """Number of calls that got no node, plus returns whose handlers in assembly did not run."""
        return int(self.stack.counters[self.address][MISSED])

    @property
    def returned(self) -> int:
        """Number of calls whose return was handled."""
        return int(self.stack.counters[self.address][RETURNED])

    def miss(self) -> None:
        """Count a call as missed."""
        count(self.stack.counters[self.address], MISSED, 1)
        if self.missed_at:
            # The owner of the number may have freed it; the call must not fail because of that.
            with suppress(MemoryFault):
                self.stack.words.view(self.missed_at, 4)[:] = (self.missed & 0xFFFFFFFF).to_bytes(4, "little")

    def emit_assembly(self, builder: ProgramBuilder, point: HandlerPoint) -> None:
        if self.assembled is not None:
            self.assembled.emit(builder, point)

    def miss_assembly(self, point: HandlerPoint) -> None:
        """Count a call as missed if the hook has a handler in assembly for `point`."""
        if self.assembled is not None and point in self.assembled:
            self.miss()

    @property
    def memory(self) -> int:
        """Size in bytes of the memory that is allocated only for this hook."""
        return self.stack.memory_of(self.address)
