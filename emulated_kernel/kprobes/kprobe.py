"""Kprobe: a probe on one instruction; AggrKprobe: the table's entry for several probes at one address."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import field
from enum import Flag, auto
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.image.kallsyms import Location
from emulated_kernel.kprobes.codegen.asm_handlers import (
    AssembledHandlers,
    AssemblyOwner,
    HandlerPoint,
    PerCpuVars,
)
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode, DetourBuffer
from emulated_kernel.kprobes.probe_state import ProbeState
from emulated_kernel.util.abi import GuestAddr
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass

MOST_HANDLERS = 400
"""Limit of handlers that one request compiles, and so of handlers per address.

Python calls thousands of handlers as fast as the emulator does.
"""

Regs = Any
"""The registers at a hit, for code that works on every architecture; handlers of users have RegsT."""

if TYPE_CHECKING:
    # Type checkers have typing_extensions of their own. A default needs Python 3.13 in the standard library.
    from typing_extensions import TypeVar

    from emulated_kernel.kprobes.regs import X86Regs

    RegsT = TypeVar("RegsT", default=X86Regs)
else:
    from typing import TypeVar

    RegsT = TypeVar("RegsT")
"""The registers that a probe's handlers get: X86Regs, I386Regs or RiscvRegs of kprobes.regs."""

FailureReport = Callable[["Kprobe", BaseException], None]
"""Takes what a handler raised."""
PreHandler: TypeAlias = Callable[["Kprobe[RegsT]", RegsT], int | None]
PostHandler: TypeAlias = (
    Callable[["Kprobe[RegsT]", RegsT], object] | Callable[["Kprobe[RegsT]", RegsT, int], object]
)
"""The optional third argument is Linux's flags, which are always 0."""
CompileHandler = Callable[[ProgramBuilder, EntryKind], bool]
"""Adds what the pre_handler does to a program; False, with nothing added, where it must run itself."""
FaultHandler: TypeAlias = Callable[["Kprobe[RegsT]", RegsT, int], int | None]
"""Takes the exception's vector; a true result means that it has dealt with it."""
BreakHandler: TypeAlias = Callable[["Kprobe[RegsT]", RegsT], int | None]


class KprobeFlag(Flag):
    """State of a probe. Mirrors: include/linux/kprobes.h KPROBE_FLAG_* (v6.1)."""

    NONE = 0
    GONE = auto()
    DISABLED = auto()
    ON_FUNC_ENTRY = auto()
    FTRACE = auto()
    OPTIMIZED = auto()
    """Patched with a jump, or queued for patching or for removal of the jump."""


# Integers, because operators of Flag take a microsecond, and arming all tests thousands of probes.
_DISABLED_OR_GONE = (KprobeFlag.DISABLED | KprobeFlag.GONE).value
_FTRACE = KprobeFlag.FTRACE.value
_GONE = KprobeFlag.GONE.value
_OPTIMIZED = KprobeFlag.OPTIMIZED.value


@dataclass(eq=False, slots=True)
class Kprobe(AssemblyOwner, Generic[RegsT]):
    """A probe on one instruction: give `symbol_name` (and `offset`, in bytes) or `addr`, never both.

    `pre_handler(kprobe, regs)` runs before the instruction. If it returns a true value, it has set regs.ip
    itself, and the instruction does not run. `post_handler(kprobe, regs)` runs after the instruction. If it
    takes a third argument, it gets Linux's flags, which are always 0.

    The type of `regs` is the type parameter: `Kprobe[RiscvRegs]` for riscv64. The default is X86Regs.

    Handlers run while the guest is stopped in the hit, and must not sleep. In a handler, calling a guest
    function and registering or unregistering a probe fail with EDEADLK. A handler that raises counts as one
    that returned 0. `Kernel.call` raises its exception afterwards.

    Mirrors: include/linux/kprobes.h:struct kprobe (v6.1).
    """

    handler_points = (HandlerPoint.PRE, HandlerPoint.POST)
    symbol_name: str | None = None
    """Name of the symbol that contains the instruction."""
    offset: int = field(default=0, metadata=ADDRESS)
    """Offset of the instruction from the symbol or from `addr`, in bytes."""
    addr: int | None = field(default=None, metadata=ADDRESS)
    """Address of the instruction. Registration sets it."""
    pre_handler: PreHandler[RegsT] | None = None
    """Called before the instruction."""
    post_handler: PostHandler[RegsT] | None = None
    """Called after the instruction. A probe with a post_handler is not optimized."""
    program: CompileHandler | None = field(default=None, repr=False)
    """Emits the pre_handler as guest code; see Kprobes.handler_changed."""
    code: str | None = None
    """A handler in assembly, which runs as guest code before the other handlers.

    It changes no register of the probed code. A name in the place of an address is one of `cells`. A fault
    ends the handler, and counts in `failures`.
    """
    post_code: str | None = None
    """A post_handler in assembly, with the same cells."""
    fault_handler: FaultHandler[RegsT] | None = None
    """Called with an exception's vector when a handler or the copied instruction faults (Linux before 5.14).

    A true result means that the exception has been handled.
    """
    break_handler: BreakHandler[RegsT] | None = None
    """Called at a breakpoint that ends the hit, if pre_handler returned a true value (Linux before 4.19)."""
    length: int = 0
    """Size of the region that a djprobe's jump replaces, in bytes; 0 for a breakpoint."""
    disabled: bool = False
    """Whether to register the probe disabled (KPROBE_FLAG_DISABLED)."""
    hits_missed: int = field(default=0, init=False, repr=False)
    """Number of hits that were not handled because a handler was running."""
    raised: int = field(default=0, init=False)
    """Number of hits whose Python handler raised an exception.

    After unregistration it also contains the hits whose assembly handler faulted.
    """
    _cells: PerCpuVars | None = field(default=None, init=False, repr=False)
    flags: KprobeFlag = field(default=KprobeFlag.NONE, init=False)
    kind: str = field(default="k", init=False, repr=False)
    """Letter in kprobes/list: `k` kprobe, `r` kretprobe, `j` jprobe."""
    state: ProbeState = field(default_factory=ProbeState, init=False, repr=False)
    """The engine's state of the probe; only the engine uses it."""

    @property
    def assembled(self) -> AssembledHandlers | None:
        """The assembled handlers of a registered probe."""
        return self.state.assembled

    def line_head(self, addr: int, where: Location | None, bits: int) -> str:
        """Return the beginning of the probe's line in kprobes/list.

        `where` is None in a module that is unloaded.
        """
        text = (
            f"0x{addr:x} "
            if where is None
            else f"{where.symbol.name}+0x{where.offset:x}  {where.module or ' '} "
        )
        return f"{addr:0{bits // 4}x}  {self.kind}  {text}"

    @property
    def nmissed(self) -> int:
        """Number of hits that were not handled, because a handler was running. It can be set."""
        return self.hits_missed

    @nmissed.setter
    def nmissed(self, value: int) -> None:
        self.hits_missed = value

    @property
    def address(self) -> GuestAddr:
        """The probed address of a registered probe."""
        assert self.addr is not None, "a probe has no address before it is registered"
        return GuestAddr(self.addr)

    def attach_assembly(self, assembled: AssembledHandlers) -> None:
        """Set the assembled handlers at registration.

        If the probe has no Python pre_handler, one without effect is added, and an empty program.
        """
        self.state.attach_assembly(assembled)
        if self.pre_handler is None:
            self.pre_handler = _nothing_else
            self.program = _no_program
        if self.post_handler is None and self.state.has_post_assembly:
            self.post_handler = _nothing_behind

    def leave_assembly(self) -> AssembledHandlers | None:
        """Remove the assembled handlers at unregistration, and return them."""
        if self.post_handler is _nothing_behind:
            self.post_handler = None
        return self.state.leave_assembly()

    def miss(self) -> None:
        """Count a hit that is not handled. Mirrors: kernel/kprobes.c:kprobes_inc_nmissed_count (v6.1)."""
        self.nmissed += 1

    @property
    def cells(self) -> PerCpuVars:
        """The variables of `code` and `post_code` by name: the sum over all CPUs of 64-bit numbers."""
        if self._cells is None:
            self._cells = PerCpuVars()
        return self._cells

    def emit(self, builder: ProgramBuilder, way: EntryKind) -> bool:
        """Emit the handling of a hit as guest code; return False if it needs Python."""
        if self.has_python_post_handler or not self.emit_pre_handlers(builder, way):
            return False
        if way is EntryKind.CALL:
            # A call does not step an instruction, so the post_handler runs at the end of the call.
            self.emit_assembly(builder, HandlerPoint.POST)
        return True

    def emit_pre_handlers(self, builder: ProgramBuilder, way: EntryKind) -> bool:
        """Emit the handlers that run before the instruction; return False if they need Python."""
        if self.program is None:
            return False
        self.emit_assembly(builder, HandlerPoint.PRE)
        return self.program(builder, way)

    @property
    def has_python_post_handler(self) -> bool:
        """Whether a Python handler runs after the step."""
        return self.post_handler is not None and self.post_handler is not _nothing_behind

    @property
    def has_program(self) -> bool:
        """Whether the pre_handler may be guest code."""
        return self.program is not None

    @property
    def may_compile(self) -> bool:
        """Whether compiling the handler may succeed."""
        return self.has_program and not self.state.is_python

    @property
    def nr_handlers(self) -> int:
        """Number of handlers that a hit calls in Python."""
        return 1

    def codes(self) -> Iterator[tuple[int, CompiledCode | DetourBuffer, int]]:
        """Iterate over the code that runs in place of the probed text.

        Each item has its entry, the code, and the number of bytes of text that it copies.
        """
        stub = self.state.stub
        if stub is not None:
            yield stub.entry, stub, 0

    @property
    def is_disabled(self) -> bool:
        return self.flags._value_ & _DISABLED_OR_GONE != 0

    @property
    def needs_breakpoint(self) -> bool:
        """Whether the probe's handlers cannot be called from a detour.

        This is the case if a handler runs after the instruction or instead of it.
        """
        return self.post_handler is not None or self.break_handler is not None

    @property
    def is_left_open(self) -> bool:
        """Whether a true result of the pre_handler does not end the hit."""
        return self.break_handler is not None

    def run_post_handler(self, regs: Regs) -> None:
        # Of either type of PostHandler, as takes_flags says.
        post_handler: Any = self.post_handler
        if self.state.takes_flags:
            post_handler(self, regs, 0)
        else:
            post_handler(self, regs)

    def run_break_handler(self, regs: Regs) -> int | None:
        return self.break_handler(self, regs) if self.break_handler is not None else None

    def run_fault_handler(self, regs: Regs, vector: int) -> int | None:
        """Call the fault handler for an exception; return a true value if it has handled the exception.

        The exception was raised by the probe's handlers or its step.
        """
        return self.fault_handler(self, regs, vector) if self.fault_handler is not None else None

    @property
    def is_ftrace(self) -> bool:
        """Whether hits come by a call from an fentry site."""
        return self.flags._value_ & _FTRACE != 0

    @property
    def is_gone(self) -> bool:
        return self.flags._value_ & _GONE != 0


@dataclass(eq=False, slots=True)
class AggrKprobe(Kprobe):
    """Table entry for all probes at one address, and for each single probe that can be optimized.

    Mirrors: kernel/kprobes.c:init_aggr_kprobe, struct optimized_kprobe (v6.1).
    """

    report: FailureReport = field(kw_only=True)
    by_age: dict[Kprobe, None] = field(default_factory=dict, init=False)
    """The members, in the reverse order of their handlers' runs; a dict, to remove one of thousands quickly.
    """
    detour: DetourBuffer | None = field(default=None, init=False, repr=False)
    has_used_detour: bool = field(default=False, init=False, repr=False)
    """Whether CPUs have been led into the detour since it was made."""
    is_patched: bool = field(default=False, init=False)
    """Whether the text has a jump to the detour at its address."""
    saved_tail: bytes = field(default=b"", init=False, repr=False)
    """The text after the breakpoint, as it was before the jump overwrote it."""
    is_held: bool = field(default=False, init=False)
    """Whether the user wants the probes to stay unoptimized."""
    _stopped_by: Kprobe | None = field(default=None, init=False, repr=False)
    """Member whose pre_handler ended the latest hit. Linux: kprobe_instance."""
    enabled_members: int = field(default=0, init=False, repr=False)
    _with_post_handler: int = field(default=0, init=False, repr=False)
    """Number of members with a post_handler, disabled or not."""
    _with_assembly: int = field(default=0, init=False, repr=False)
    _with_post_assembly: int = field(default=0, init=False, repr=False)
    _pre_handlers: list[tuple[PreHandler, Kprobe]] | None = field(default=None, init=False, repr=False)
    """Pre_handlers of enabled members.

    None: collect them at the next hit, because thousands may change before.
    """
    _with_post_handlers: list[Kprobe] = field(default_factory=list, init=False, repr=False)

    def codes(self) -> Iterator[tuple[int, CompiledCode | DetourBuffer, int]]:
        yield from Kprobe.codes(self)
        if self.detour is not None:
            yield self.detour.address, self.detour, self.detour.length
            compiled = self.state.compiled
            if compiled is not None:
                yield compiled.entry, compiled, self.detour.length

    @property
    def members(self) -> Iterator[Kprobe]:
        """The members, newest first, as their handlers run; a jprobe is last."""
        return reversed(self.by_age)

    @property
    def is_optimized(self) -> bool:
        """Whether hits run the copies in the detour, reached by a jump or by a breakpoint."""
        return self.flags._value_ & _OPTIMIZED != 0

    @property
    def is_unused(self) -> bool:
        """Whether the last member is gone and only the unoptimization is pending.

        Mirrors: kprobe_unused (v6.1).
        """
        return not self.by_age and self.is_disabled

    def miss(self) -> None:
        for member in self.by_age:
            member.miss()

    def miss_assembly(self, moment: HandlerPoint) -> None:
        for _, member in self._collected():
            member.miss_assembly(moment)

    def emit_pre_handlers(self, builder: ProgramBuilder, way: EntryKind) -> bool:
        """Emit the handlers of all members; return False if one needs Python."""
        return all(member.emit_pre_handlers(builder, way) for _, member in self._collected())

    def emit_assembly(self, builder: ProgramBuilder, moment: HandlerPoint) -> None:
        for _, member in self._collected():
            member.emit_assembly(builder, moment)

    @property
    def has_python_post_handler(self) -> bool:
        self._collected()
        return any(member.has_python_post_handler for member in self._with_post_handlers)

    @property
    def may_compile(self) -> bool:
        if self.state.is_python or not 0 < self.nr_handlers <= MOST_HANDLERS:
            return False
        return all(member.has_program for _, member in self._collected())

    @property
    def nr_handlers(self) -> int:
        return len(self._collected())

    @property
    def is_left_open(self) -> bool:
        return self._stopped_by is not None and self._stopped_by.break_handler is not None

    def run_break_handler(self, regs: Regs) -> int | None:
        assert self._stopped_by is not None
        return self._stopped_by.run_break_handler(regs)

    def run_fault_handler(self, regs: Regs, vector: int) -> int | None:
        return next((1 for member in self.members if member.run_fault_handler(regs, vector)), None)

    def run_pre_handlers(self, regs: Regs) -> int | None:
        self._stopped_by = None
        pre_handlers = self._pre_handlers
        for pre_handler, member in self._collected() if pre_handlers is None else pre_handlers:
            try:
                if pre_handler(member, regs):
                    self._stopped_by = member
                    return 1
            except BaseException as error:
                self.report(member, error)
        return None

    def run_all_pre_handlers(self, regs: Regs) -> None:
        """Call all pre_handlers; none can change where a detour continues.

        Mirrors: kernel/kprobes.c:opt_pre_handler (v6.1).
        """
        pre_handlers = self._pre_handlers
        for pre_handler, member in self._collected() if pre_handlers is None else pre_handlers:
            try:
                pre_handler(member, regs)
            except BaseException as error:
                self.report(member, error)

    def run_post_handlers(self, regs: Regs) -> None:
        self._collected()
        for member in self._with_post_handlers:
            try:
                member.run_post_handler(regs)
            except BaseException as error:
                self.report(member, error)

    def add(self, member: Kprobe) -> None:
        """Add a member, whose handlers run first.

        A jprobe runs last, because it does not return to the others.
        """
        if member.break_handler is None:
            self.by_age[member] = None
        else:
            self.by_age = {member: None, **self.by_age}
        member.state.aggregator = self
        self.enabled_members += not member.is_disabled
        self._with_post_handler += member.post_handler is not None
        self._with_assembly += member.state.has_assembly
        self._with_post_assembly += member.state.has_post_assembly
        if member.break_handler is not None:
            self.break_handler = member.break_handler

    def remove(self, member: Kprobe) -> None:
        """Remove a member; there is at most one jprobe."""
        del self.by_age[member]
        member.state.aggregator = None
        self.enabled_members -= not member.is_disabled
        self._with_post_handler -= member.post_handler is not None
        self._with_assembly -= member.state.has_assembly
        self._with_post_assembly -= member.state.has_post_assembly
        if member.break_handler is not None:
            self.break_handler = None

    def refresh_handlers(self) -> None:
        """Update the handlers after a change of the members or their flags.

        The aggregator has a post_handler exactly while a member has one, disabled or not. It prevents
        boosting and optimization.
        """
        self._pre_handlers = None
        self.state.has_assembly = self._with_assembly > 0
        self.state.has_post_assembly = self._with_post_assembly > 0
        self.pre_handler = _run_pre_handlers
        self.post_handler = _run_post_handlers if self._with_post_handler else None

    def _collected(self) -> list[tuple[PreHandler, Kprobe]]:
        """Return the pre_handlers of enabled members; collect them, and the post_handlers, if necessary."""
        pre_handlers = self._pre_handlers
        if pre_handlers is None:
            enabled = [member for member in self.members if not member.is_disabled]
            self._pre_handlers = pre_handlers = [
                (member.pre_handler, member) for member in enabled if member.pre_handler is not None
            ]
            self._with_post_handlers = [member for member in enabled if member.post_handler is not None]
        return pre_handlers


def takes_flags(handler: PostHandler[Any]) -> bool:
    """Return True if a post_handler requires a third argument."""
    try:
        parameters = signature(handler).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(it.kind in positional and it.default is Parameter.empty for it in parameters) == 3


def _nothing_else(_kprobe: Kprobe[Any], _regs: Regs) -> None:
    """Do nothing: the Python pre_handler of a probe whose only pre_handler is in assembly."""


def _nothing_behind(_kprobe: Kprobe[Any], _regs: Regs) -> None:
    """Do nothing: the Python post_handler of a probe whose only post_handler is in assembly."""


def _no_program(_builder: ProgramBuilder, _way: EntryKind) -> bool:
    """Emit nothing: the program of a probe whose only pre_handler is in assembly."""
    return True


# Handlers of aggregators. They are shared functions, one object for all aggregators.


def _run_pre_handlers(head: Kprobe, regs: Regs) -> int | None:
    assert isinstance(head, AggrKprobe)
    return head.run_pre_handlers(regs)


def _run_post_handlers(head: Kprobe, regs: Regs) -> None:
    assert isinstance(head, AggrKprobe)
    head.run_post_handlers(regs)
