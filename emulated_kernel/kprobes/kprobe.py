"""Kprobe: the user's record of a probe on one instruction."""

from __future__ import annotations

from collections.abc import Callable
from enum import Flag, auto
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kprobes.codegen.asm_handlers import AssembledHandlers, FailureCount, PerCpuVars
from emulated_kernel.util.abi import GuestAddr
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass, field

Regs = Any
"""The registers at a hit, in code for every architecture. The handlers of users take RegsT instead."""

if TYPE_CHECKING:
    # Type checkers have typing_extensions of their own. A default needs Python 3.13 in the standard library.
    from typing_extensions import TypeVar

    from emulated_kernel.kprobes.regs import X86Regs

    RegsT = TypeVar("RegsT", default=X86Regs)
else:
    from typing import TypeVar

    RegsT = TypeVar("RegsT")
"""The registers that a probe's handlers get: X86Regs, I386Regs or RiscvRegs of kprobes.regs."""

PreHandler: TypeAlias = Callable[["Kprobe[RegsT]", RegsT], int | None]
"""Function that takes the probe and the registers.

A true result means that the handler has set regs.ip itself.
"""
PostHandler: TypeAlias = (
    Callable[["Kprobe[RegsT]", RegsT], object] | Callable[["Kprobe[RegsT]", RegsT, int], object]
)
"""Function that takes the probe, the registers and optionally Linux's flags, which are always 0."""
CompileHandler = Callable[[ProgramBuilder, EntryKind], bool]
"""Function that adds the effect of a handler, such as the pre_handler, to a program and returns True.

The EntryKind tells how hits enter the program. If the handler itself must run, the function adds nothing and
returns False.
"""
FaultHandler: TypeAlias = Callable[["Kprobe[RegsT]", RegsT, int], int | None]
"""Function that takes the probe, the registers and the exception's vector.

A true result means that the handler has handled the exception.
"""
BreakHandler: TypeAlias = Callable[["Kprobe[RegsT]", RegsT], int | None]
"""Function that takes the probe and the registers.

If the result is true, the probed instruction runs, and the hit ends. Otherwise the guest continues at
regs.ip.
"""


class KprobeFlag(Flag):
    """State of a probe. Mirrors: include/linux/kprobes.h KPROBE_FLAG_* (v6.1)."""

    NONE = 0
    GONE = auto()
    DISABLED = auto()
    ON_FUNC_ENTRY = auto()
    FTRACE = auto()
    OPTIMIZED = auto()
    """Patched with a jump, or queued for patching or for removal of the jump.

    As in Linux, only the aggregator probe of an address has this flag, never a registered Kprobe. To ask for
    the state of a Kprobe, call Kernel.probe_mode().
    """


# Integers, because operators of Flag take a microsecond, and arming all tests thousands of probes.
_DISABLED_OR_GONE = (KprobeFlag.DISABLED | KprobeFlag.GONE).value
_FTRACE = KprobeFlag.FTRACE.value
_GONE = KprobeFlag.GONE.value


@dataclass(eq=False, slots=True)
class Kprobe(FailureCount, Generic[RegsT]):
    """A probe on one instruction: give `symbol_name` (and `offset`, in bytes) or `addr`, never both.

    `pre_handler(kprobe, regs)` runs before the instruction. A true result means that the handler has set
    regs.ip itself; then the instruction does not run. `post_handler(kprobe, regs)` runs after the
    instruction. If post_handler has a third parameter, its argument is Linux's flags, which are always 0.

    The type of `regs` is the type parameter: `Kprobe[RiscvRegs]` for riscv64. The default is X86Regs.

    Handlers run while the guest is stopped in the hit, and must not sleep. In a handler, calling a guest
    function and registering or unregistering a probe fail with EDEADLK. A handler that raises an exception
    counts as one that returned 0. `Kernel.call` raises the exception afterwards.

    Mirrors: include/linux/kprobes.h:struct kprobe (v6.1).
    """

    symbol_name: str | None = None
    """Name of the symbol that contains the instruction."""
    offset: int = field(default=0, metadata=ADDRESS)
    """Offset of the instruction from the symbol or from `addr`, in bytes."""
    addr: int | None = field(default=None, metadata=ADDRESS)
    """Address of the instruction if `offset` is 0. Registration sets it to the probed address."""
    pre_handler: PreHandler[RegsT] | None = None
    """Called before the instruction."""
    post_handler: PostHandler[RegsT] | None = None
    """Called after the instruction. A probe with a post_handler is not optimized."""
    program: CompileHandler | None = field(default=None, repr=False)
    """Function that emits guest code in place of `pre_handler`; None: there is no such code.

    After a change of the emitted code, call Kprobes.handler_changed().
    """
    code: str | None = None
    """A handler in assembly, which runs as guest code before the other handlers; None: there is none.

    It changes no register of the probed code. A name in the place of a memory address, as in `inc qword ptr
    [hits]`, is a variable in `cells`. A fault ends the handler, and counts in `failures`.
    """
    post_code: str | None = None
    """A post_handler in assembly, which shares `cells` with `code`; None: there is none."""
    fault_handler: FaultHandler[RegsT] | None = None
    """Called with an exception's vector when a handler or the copied instruction faults (Linux before 5.14).

    A true result means that the exception has been handled.
    """
    break_handler: BreakHandler[RegsT] | None = None
    """Called at the breakpoint that ends a hit, if pre_handler returned a true value (Linux before 4.19)."""
    length: int = 0
    """Size in bytes of the region that a djprobe's jump replaces; 0: the probe is not a djprobe."""
    disabled: bool = False
    """Whether to register the probe disabled (KPROBE_FLAG_DISABLED)."""
    raised: int = field(default=0, init=False)
    """Number of hits whose Python handler raised an exception.

    After unregistration it also contains the hits whose assembly handler faulted.
    """
    flags: KprobeFlag = field(default=KprobeFlag.NONE, init=False)
    """State of the probe. Registration sets it."""
    _missed: int = field(default=0, init=False, repr=False)
    _kind: str = field(default="", init=False, repr=False)
    """Letter of a registered probe in kprobes/list: KPROBE, KRETPROBE or JPROBE."""
    _takes_flags: bool = field(default=False, init=False, repr=False)
    """Whether the post_handler of a registered probe has a third argument."""
    _cells: PerCpuVars | None = field(default=None, init=False, repr=False)
    _assembled: AssembledHandlers | None = field(default=None, init=False, repr=False)
    """The assembled handlers of a registered probe. They also count the hits at which they faulted."""

    @property
    def nmissed(self) -> int:
        """Number of missed hits since registration; users may set this number.

        A hit is missed if it occurs while another hit is handled, or if there is no room for the machine
        code of `code` or `post_code`. As in Linux, a memory fault of a handler counts too, if the probe has
        a fault_handler.
        """
        return self._missed

    @nmissed.setter
    def nmissed(self, value: int) -> None:
        self._missed = value

    @property
    def address(self) -> GuestAddr:
        """The probed address of a registered probe."""
        assert self.addr is not None, "a probe has no address before it is registered"
        return GuestAddr(self.addr)

    @property
    def cells(self) -> PerCpuVars:
        """Name of a variable of `code` and `post_code` -> its value, the sum of the numbers of all CPUs.

        Each CPU has an unsigned 64-bit number for each variable. The sum is modulo 2**64.
        """
        if self._cells is None:
            self._cells = PerCpuVars()
        return self._cells

    @property
    def is_disabled(self) -> bool:
        """Whether the handlers are not called: the probe is disabled, or its code is gone."""
        return self.flags._value_ & _DISABLED_OR_GONE != 0

    @property
    def is_ftrace(self) -> bool:
        """Whether hits come by a call from an fentry site."""
        return self.flags._value_ & _FTRACE != 0

    @property
    def is_gone(self) -> bool:
        """Whether the probed code was freed with its module."""
        return self.flags._value_ & _GONE != 0
