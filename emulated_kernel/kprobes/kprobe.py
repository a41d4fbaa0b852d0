"""Kprobe: what a user registers; AggrKprobe: what stands for several of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import field
from enum import Flag, auto
from inspect import Parameter, signature
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.image.kallsyms import Location
from emulated_kernel.kprobes.codegen.asm_handlers import (
    AssembledHandlers,
    AssemblyOwner,
    HandlerPoint,
    PerCpuVars,
)
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode, DetourBuffer, OutOfLine
from emulated_kernel.util.abi import GuestAddr
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass

MOST_HANDLERS = 400
"""Made guest code in one request, and so of one address: Python calls thousands as fast as the emulator."""
COSTS_KEPT = 63
"""Latest hits whose cost is kept; an odd number has a median."""

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


class HitCost:
    """What handling a hit took on the host: from the breakpoint to the instruction behind the probed one."""

    __slots__ = ("latest", "started")

    def __init__(self) -> None:
        self.latest: deque[int] | None = None
        """Nanoseconds, made at the first hit: of many probes few are ever hit."""
        self.started = 0
        """When the hit began that is being handled; nanoseconds."""

    def text(self, hits: int) -> str:
        """Hits, and the median of the latest ones' nanoseconds."""
        if not self.latest:
            return f"hits {hits}"
        from statistics import median

        return f"hits {hits} median {round(median(self.latest))} ns of the last {len(self.latest)}"


class KprobeFlag(Flag):
    """Mirrors: include/linux/kprobes.h KPROBE_FLAG_* (v6.1)."""

    NONE = 0
    GONE = auto()
    DISABLED = auto()
    ON_FUNC_ENTRY = auto()
    FTRACE = auto()
    OPTIMIZED = auto()
    """Patched with a jump, or queued for that or for its end."""


# Asked of thousands of probes when all are armed: operators of Flag take a microsecond.
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
    program: CompileHandler | None = None
    """The pre_handler as guest code; see Kprobes.handler_changed."""
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
    """Hits that were not handled because a handler was running."""
    raised: int = field(default=0, init=False)
    """Hits whose handler in Python raised; once it is unregistered, those as well whose code faulted."""
    _cells: PerCpuVars | None = field(default=None, init=False, repr=False)
    assembled: AssembledHandlers | None = field(default=None, init=False, repr=False)
    """Of a registered probe."""
    has_assembly: bool = field(default=False, init=False, repr=False)
    """Whether it has `code`, or probes that it stands for."""
    has_post_assembly: bool = field(default=False, init=False, repr=False)
    """The same of `post_code`."""
    takes_flags: bool = field(default=False, init=False, repr=False)
    """The post_handler has a third argument; as of its registration."""
    flags: KprobeFlag = field(default=KprobeFlag.NONE, init=False)
    kind: str = field(default="k", init=False)
    """As kprobes/list shows it: `k` kprobe, `r` kretprobe, `j` jprobe."""
    insn: OutOfLine | None = field(default=None, init=False, repr=False)
    cost: HitCost = field(default_factory=HitCost, init=False, repr=False)
    rejection: Rejection | str = field(default="", init=False, repr=False)
    """Why it can't be optimized: address and rule; empty where it can."""
    place: str = field(default="", init=False, repr=False)
    """Its `line_head`, in the kernel proper, where that never changes."""
    stub: CompiledCode | None = field(default=None, init=False, repr=False)
    """The handler that a hit by a breakpoint is sent to."""
    compiled: CompiledCode | None = field(default=None, init=False, repr=False)
    """The compiled handler that the jump or call in the text reaches; None: it traps."""
    sample: dict[str, int] | None = field(default=None, init=False, repr=False)
    """Registers at the hit before its handler was compiled."""
    aggregator: AggrKprobe | None = field(default=None, init=False, repr=False)
    """What stands in the table for it, where it isn't that itself."""
    is_python: bool = field(default=False, init=False, repr=False)
    """It was found that the handler can't be guest code as it is now."""

    def line_head(self, addr: int, where: Location | None, bits: int) -> str:
        """What its line in kprobes/list begins with; `where` is None in a module that has gone."""
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
        """It is registered; without handlers of another kind its program has nothing but this."""
        self.assembled = assembled
        self.has_assembly = HandlerPoint.PRE in assembled
        self.has_post_assembly = HandlerPoint.POST in assembled
        if self.pre_handler is None:
            self.pre_handler = _nothing_else
            self.program = _no_program
        if self.post_handler is None and self.has_post_assembly:
            self.post_handler = _nothing_behind

    def leave_assembly(self) -> AssembledHandlers | None:
        """It isn't registered any more; returns what it had."""
        assembled = self.assembled
        self.assembled = None
        self.has_assembly = False
        self.has_post_assembly = False
        if self.post_handler is _nothing_behind:
            self.post_handler = None
        return assembled

    def miss(self) -> None:
        """Count a hit that isn't handled. Mirrors: kernel/kprobes.c:kprobes_inc_nmissed_count (v6.1)."""
        self.nmissed += 1

    @property
    def cells(self) -> PerCpuVars:
        """The variables of `code` and `post_code` by name: the sum over all CPUs of 64-bit numbers."""
        if self._cells is None:
            self._cells = PerCpuVars()
        return self._cells

    def emit(self, builder: ProgramBuilder, way: EntryKind) -> bool:
        """Add what is done at a hit to a program; False where it takes Python."""
        if self.has_python_post_handler or not self.emit_pre_handlers(builder, way):
            return False
        if way is EntryKind.CALL:
            # What is called has nothing to step: the instruction's end is the call's.
            self.emit_assembly(builder, HandlerPoint.POST)
        return True

    def emit_pre_handlers(self, builder: ProgramBuilder, way: EntryKind) -> bool:
        """The same of what runs in front of the instruction."""
        if self.program is None:
            return False
        self.emit_assembly(builder, HandlerPoint.PRE)
        return self.program(builder, way)

    @property
    def has_python_post_handler(self) -> bool:
        """Whether the step's end is Python's."""
        return self.post_handler is not None and self.post_handler is not _nothing_behind

    @property
    def has_program(self) -> bool:
        """Whether the pre_handler may be guest code."""
        return self.program is not None

    @property
    def may_compile(self) -> bool:
        """Whether it is worth asking."""
        return self.has_program and not self.is_python

    @property
    def nr_handlers(self) -> int:
        """Those that a hit calls in Python."""
        return 1

    def codes(self) -> Iterator[tuple[int, CompiledCode | DetourBuffer, int]]:
        """What is run in place of the probed text: its entry, itself, and how much text it copies; bytes."""
        if self.stub is not None:
            yield self.stub.entry, self.stub, 0

    @property
    def is_disabled(self) -> bool:
        return self.flags._value_ & _DISABLED_OR_GONE != 0

    @property
    def needs_breakpoint(self) -> bool:
        """Whether its handlers can't be called from a detour: one runs behind the instruction, or instead."""
        return self.post_handler is not None or self.break_handler is not None

    @property
    def is_left_open(self) -> bool:
        """Whether a true result of the pre_handler isn't the hit's end."""
        return self.break_handler is not None

    def run_post_handler(self, regs: Regs) -> None:
        # Of either type of PostHandler, as takes_flags says.
        post_handler: Any = self.post_handler
        if self.takes_flags:
            post_handler(self, regs, 0)
        else:
            post_handler(self, regs)

    def run_break_handler(self, regs: Regs) -> int | None:
        return self.break_handler(self, regs) if self.break_handler is not None else None

    def run_fault_handler(self, regs: Regs, vector: int) -> int | None:
        """Offer it an exception of its handlers or of its step; true if it has dealt with it."""
        return self.fault_handler(self, regs, vector) if self.fault_handler is not None else None

    @property
    def is_ftrace(self) -> bool:
        """Whether it is reached by a call from an fentry site."""
        return self.flags._value_ & _FTRACE != 0

    @property
    def is_gone(self) -> bool:
        return self.flags._value_ & _GONE != 0


@dataclass(eq=False, slots=True)
class AggrKprobe(Kprobe):
    """Stands in the table for all probes of one address, and for each one that can be optimized.

    Mirrors: kernel/kprobes.c:init_aggr_kprobe, struct optimized_kprobe (v6.1).
    """

    report: FailureReport = field(kw_only=True)
    by_age: dict[Kprobe, None] = field(default_factory=dict, init=False)
    """The members in the opposite order of their handlers' runs; removing one doesn't search thousands."""
    detour: DetourBuffer | None = field(default=None, init=False, repr=False)
    has_used_detour: bool = field(default=False, init=False, repr=False)
    """CPUs have been led into it since it was made."""
    is_patched: bool = field(default=False, init=False)
    """The text has a jump to the detour at its address."""
    saved_tail: bytes = field(default=b"", init=False, repr=False)
    """Text behind the breakpoint, as it was when the jump was written over it."""
    is_held: bool = field(default=False, init=False)
    """Its user wants it unoptimized."""
    _stopped_by: Kprobe | None = field(default=None, init=False, repr=False)
    """The member whose pre_handler was the last one of the latest hit. Linux: kprobe_instance."""
    enabled_members: int = field(default=0, init=False, repr=False)
    _with_post_handler: int = field(default=0, init=False, repr=False)
    """Members that have one, disabled or not."""
    _with_assembly: int = field(default=0, init=False, repr=False)
    _with_post_assembly: int = field(default=0, init=False, repr=False)
    _pre_handlers: list[tuple[PreHandler, Kprobe]] | None = field(default=None, init=False, repr=False)
    """Those of enabled members; None: to be collected at the next hit, for thousands may change before."""
    _with_post_handlers: list[Kprobe] = field(default_factory=list, init=False, repr=False)

    def codes(self) -> Iterator[tuple[int, CompiledCode | DetourBuffer, int]]:
        yield from Kprobe.codes(self)
        if self.detour is not None:
            yield self.detour.address, self.detour, self.detour.length
            if self.compiled is not None:
                yield self.compiled.entry, self.compiled, self.detour.length

    @property
    def members(self) -> Iterator[Kprobe]:
        """Newest first, as their handlers run; a jprobe last."""
        return reversed(self.by_age)

    @property
    def is_optimized(self) -> bool:
        """Whether hits run the detour's copies, be the jump in the text or a breakpoint."""
        return self.flags._value_ & _OPTIMIZED != 0

    @property
    def is_unused(self) -> bool:
        """Its last probe is gone, and only its unoptimization is awaited. Mirrors: kprobe_unused (v6.1)."""
        return not self.by_age and self.is_disabled

    def miss(self) -> None:
        for member in self.by_age:
            member.miss()

    def miss_assembly(self, moment: HandlerPoint) -> None:
        for _, member in self._collected():
            member.miss_assembly(moment)

    def emit_pre_handlers(self, builder: ProgramBuilder, way: EntryKind) -> bool:
        """All its members' handlers, or none of them."""
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
        if self.is_python or not 0 < self.nr_handlers <= MOST_HANDLERS:
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
        """On the detour a handler can't go elsewhere. Mirrors: kernel/kprobes.c:opt_pre_handler (v6.1)."""
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
        """Newest first; a jprobe doesn't come back to the others."""
        if member.break_handler is None:
            self.by_age[member] = None
        else:
            self.by_age = {member: None, **self.by_age}
        member.aggregator = self
        self.enabled_members += not member.is_disabled
        self._with_post_handler += member.post_handler is not None
        self._with_assembly += member.has_assembly
        self._with_post_assembly += member.has_post_assembly
        if member.break_handler is not None:
            self.break_handler = member.break_handler

    def remove(self, member: Kprobe) -> None:
        """The opposite of `add`; of jprobes there is one at most."""
        del self.by_age[member]
        member.aggregator = None
        self.enabled_members -= not member.is_disabled
        self._with_post_handler -= member.post_handler is not None
        self._with_assembly -= member.has_assembly
        self._with_post_assembly -= member.has_post_assembly
        if member.break_handler is not None:
            self.break_handler = None

    def refresh_handlers(self) -> None:
        """The handlers of enabled members change; to be called when a member or its flags do.

        A post_handler of its own it has exactly while a member has one: it decides on boosting and
        optimization, disabled or not.
        """
        self._pre_handlers = None
        self.has_assembly = self._with_assembly > 0
        self.has_post_assembly = self._with_post_assembly > 0
        self.pre_handler = _run_pre_handlers
        self.post_handler = _run_post_handlers if self._with_post_handler else None

    def _collected(self) -> list[tuple[PreHandler, Kprobe]]:
        """The enabled members' pre_handlers; their post_handlers are collected with them."""
        pre_handlers = self._pre_handlers
        if pre_handlers is None:
            enabled = [m for m in self.members if not m.is_disabled]
            self._pre_handlers = pre_handlers = [
                (m.pre_handler, m) for m in enabled if m.pre_handler is not None
            ]
            self._with_post_handlers = [m for m in enabled if m.post_handler is not None]
        return pre_handlers


def takes_flags(handler: PostHandler[Any]) -> bool:
    """Whether a post_handler can't do without a third argument."""
    try:
        parameters = signature(handler).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(it.kind in positional and it.default is Parameter.empty for it in parameters) == 3


def _nothing_else(_kprobe: Kprobe[Any], _regs: Regs) -> None:
    """The pre_handler in Python of a probe that has one in assembly alone."""


def _nothing_behind(_kprobe: Kprobe[Any], _regs: Regs) -> None:
    """The same of its post_handler."""


def _no_program(_builder: ProgramBuilder, _way: EntryKind) -> bool:
    """And what is made of that."""
    return True


# One object each for all aggregators, whose own handlers they are.


def _run_pre_handlers(head: Kprobe, regs: Regs) -> int | None:
    assert isinstance(head, AggrKprobe)
    return head.run_pre_handlers(regs)


def _run_post_handlers(head: Kprobe, regs: Regs) -> None:
    assert isinstance(head, AggrKprobe)
    head.run_post_handlers(regs)
