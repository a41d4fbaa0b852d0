"""AggrKprobe: the engine's object for one probed address, whose members are the users' probes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.reject_reason import Rejection
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kprobes.codegen.asm_handlers import AssembledHandlers, AssemblyOwner, HandlerPoint
from emulated_kernel.kprobes.codegen.guest_code import CompiledCode, DetourBuffer, OutOfLine
from emulated_kernel.kprobes.kprobe import Kprobe, KprobeFlag, PostHandler, PreHandler, Regs
from emulated_kernel.util.abi import GuestAddr
from emulated_kernel.util.fast_dataclass import ADDRESS, dataclass, field

MAX_HANDLERS = 400
"""Maximum number of handlers that are compiled while the control lock is held once.

If an address has more handlers, Python handles its hits. Compiling them is useless: with thousands of
handlers, guest code is no faster than Python.
"""
MAX_LATEST = 63
"""Number of latest hits whose cost is kept; it is odd, so that the median is one of the costs."""

JPROBE = "j"
KPROBE = "k"
KRETPROBE = "r"
"""Letter of a kretprobe in kprobes/list; JPROBE and KPROBE are the letters of the other kinds."""

FailureReport = Callable[[Kprobe, BaseException], None]
"""Function that takes a probe and the exception that a handler of this probe raised."""
_PostCall = Callable[[Kprobe, Regs], object]
PreCall = tuple[Callable[[Any, Regs], "int | None"], Any]
"""Pair: a function that calls an address's pre_handlers, and the first argument to call it with."""

# Integers, because operators of Flag take a microsecond, and arming all tests thousands of probes.
_DISABLED_OR_GONE = (KprobeFlag.DISABLED | KprobeFlag.GONE).value
_FTRACE = KprobeFlag.FTRACE.value
_GONE = KprobeFlag.GONE.value
_OPTIMIZED = KprobeFlag.OPTIMIZED.value


class HitCost:
    """Time that the host spends on a hit in Python, from the breakpoint to the end of Python's part."""

    __slots__ = ("latest",)

    def __init__(self) -> None:
        self.latest: deque[int] | None = None
        """Costs of the latest hits in nanoseconds, the newest last; None before the first hit.

        Most probes are never hit, so the deque is created late.
        """

    def kept(self) -> deque[int]:
        """Return the deque `latest`, and create it if it does not exist yet.

        The caller appends the cost of each hit to the deque.
        """
        if self.latest is None:
            self.latest = deque(maxlen=MAX_LATEST)
        return self.latest

    def forget(self) -> None:
        """Delete the costs, because the next hits will be handled in another way."""
        if self.latest:
            self.latest.clear()

    def text(self, hits: int) -> str:
        """Return a line for people: `hits`, the number of all hits, and the median cost of the latest ones.

        The median is in nanoseconds. If no cost is stored, the line has only the number of hits.
        """
        if not self.latest:
            return f"hits {hits}"
        from statistics import median

        return f"hits {hits} median {round(median(self.latest))} ns of the last {len(self.latest)}"


@dataclass(eq=False, slots=True)
class AggrKprobe(AssemblyOwner):
    """The entry of one probed address in the table of probes.

    Linux: the entry of an address with one probe that cannot be optimized is the user's struct kprobe itself.
    Deviates: every address has this object, and `is_aggregated` says whether Linux's entry is an aggregator.

    Mirrors: kernel/kprobes.c:init_aggr_kprobe, struct optimized_kprobe (v6.1).
    """

    address: GuestAddr = field(metadata=ADDRESS)
    report: FailureReport = field(repr=False)
    flags: KprobeFlag
    """The flags of the address, which may differ from the members' flags."""
    members: tuple[Kprobe, ...] | dict[Kprobe, None] = field(default=(), init=False)
    """The members. Their handlers run in the reverse of this order; see `by_run`.

    Several members are in a dict, because one of thousands of members must be removed quickly. Most addresses
    have one member, which is in a tuple, because a tuple takes less memory.
    """
    is_aggregated: bool = field(default=False, init=False)
    """Whether Linux would have an aggregator at the address.

    True if a second probe was registered at the address, or if there is a detour.
    """
    enabled_members: int = field(default=0, init=False, repr=False)
    insn: OutOfLine | None = field(default=None, init=False, repr=False)
    """The out-of-line form of the probed instruction.

    None at an fentry site, and after InsnCopier.release() has freed the slot.
    """
    _cost: HitCost | None = field(default=None, init=False, repr=False)
    list_text: str = field(default="", init=False, repr=False)
    """Symbol, offset and module of the address, as kprobes/list shows them.

    The text is cached when the file is read for the first time. It is "" before that, and always for an
    address in a module, which may be unloaded.
    """
    rejection: Rejection | str = field(default="", init=False, repr=False)
    """Address and rule that prevent optimization, as an object or as a text; "" if nothing prevents it."""
    stub: CompiledCode | None = field(default=None, init=False, repr=False)
    """Compiled handler to which hits by the breakpoint lead; None: Python handles these hits."""
    compiled: CompiledCode | None = field(default=None, init=False, repr=False)
    """Compiled handler to which the jump or call in the text leads; None: Python handles these hits."""
    sample: dict[str, int] | None = field(default=None, init=False, repr=False)
    """Register name -> value at the last hit before the handlers were compiled; None without such a hit."""
    is_python: bool = field(default=False, init=False, repr=False)
    """Whether Python handles all hits until the handlers change, because they cannot be compiled."""
    has_assembly: bool = field(default=False, init=False, repr=False)
    """Whether any member, enabled or disabled, has `code`."""
    has_post_assembly: bool = field(default=False, init=False, repr=False)
    """Whether any member, enabled or disabled, has `post_code`."""
    has_post_handler: bool = field(default=False, init=False, repr=False)
    """Whether any member, enabled or disabled, has a post_handler or `post_code`. This prevents boosting."""
    detour: DetourBuffer | None = field(default=None, init=False, repr=False)
    """The detour, or None if the address has none.

    If the probes were registered disabled, the detour is created when one of the probes is enabled or
    examined.
    """
    awaits_detour: bool = field(default=False, init=False, repr=False)
    """Whether the detour of several probes, which were all registered disabled, has yet to be created.

    It is created when one of the probes is enabled or examined.
    """
    has_used_detour: bool = field(default=False, init=False, repr=False)
    """Whether the detour has been used since its creation; if so, a CPU may be executing its code."""
    is_patched: bool = field(default=False, init=False)
    """Whether the text at the probed address has a jump to the detour."""
    saved_tail: bytes = field(default=b"", init=False, repr=False)
    """The text after the breakpoint, as it was before the latest jump overwrote it.

    The value is b"" before the first jump.
    """
    is_held: bool = field(default=False, init=False)
    """Whether the user wants the probes to stay unoptimized."""
    jprobe: Kprobe | None = field(default=None, init=False, repr=False)
    """The member that is a jprobe or has a break_handler; None without one. There is at most one."""
    _stopped_by: Kprobe | None = field(default=None, init=False, repr=False)
    """Member whose pre_handler returned a true value at the latest hit, or None. Linux: kprobe_instance."""
    _with_post_handler: int = field(default=0, init=False, repr=False)
    _with_assembly: int = field(default=0, init=False, repr=False)
    _with_post_assembly: int = field(default=0, init=False, repr=False)
    continues_at: int | None = field(default=None, init=False, repr=False)
    """Address at which the guest, without Python, continues after the pre_handlers of a breakpoint hit.

    None if Python emulates the instruction, or if a handler runs after it.
    """
    pre_call: PreCall | None = field(default=None, init=False, repr=False)
    """Function that calls the pre_handlers in Python, and its first argument.

    If only one enabled member has a pre_handler, these are that handler and the member. Otherwise they are
    `run_pre_handlers` and this object. The value is None after a change of the members, until collect()
    determines it at the next hit. Thousands of members may change before this hit.
    """
    _pre_handlers: Sequence[tuple[PreHandler, Kprobe]] = field(default=(), init=False, repr=False)
    """Pairs: the pre_handler of an enabled member, and this member. Set by collect()."""
    _post_handlers: Sequence[tuple[_PostCall, Kprobe]] = field(default=(), init=False, repr=False)
    """Pairs: a function that calls an enabled member's post_handler, and the member. Set by collect()."""

    # State

    @property
    def cost(self) -> HitCost:
        """Time that the host takes to handle the latest hits."""
        if self._cost is None:
            self._cost = HitCost()
        return self._cost

    @property
    def is_disabled(self) -> bool:
        """Whether all probes of the address are disabled, or the probed code was freed."""
        return self.flags._value_ & _DISABLED_OR_GONE != 0

    @property
    def is_gone(self) -> bool:
        """Whether the probed code was freed."""
        return self.flags._value_ & _GONE != 0

    @property
    def is_ftrace(self) -> bool:
        """Whether hits come by a call from an fentry site."""
        return self.flags._value_ & _FTRACE != 0

    @property
    def is_optimized(self) -> bool:
        """Whether hits run the copied instructions in the detour, after a jump or a breakpoint."""
        return self.flags._value_ & _OPTIMIZED != 0

    @property
    def is_unused(self) -> bool:
        """Whether the last member was unregistered, and the entry exists only until the jump is removed.

        Mirrors: kernel/kprobes.c:kprobe_unused (v6.1).
        """
        return not self.members and self.is_disabled

    @property
    def needs_breakpoint(self) -> bool:
        """Whether hits must come by the breakpoint, because the handlers cannot be called from a detour.

        This is the case if a handler runs after the instruction or instead of it.
        """
        return self.has_post_handler or self.jprobe is not None

    @property
    def is_left_open(self) -> bool:
        """Whether the latest hit waits for a break_handler to end it.

        The pre_handler of the member with this break_handler has returned a true value.
        """
        return self._stopped_by is not None and self._stopped_by.break_handler is not None

    @property
    def entered_stub(self) -> CompiledCode | None:
        """The stub that hits enter; None without a stub, or while a jump in the text leads to the detour."""
        return None if self.is_patched else self.stub

    def codes(self) -> Iterator[tuple[int, CompiledCode | DetourBuffer, Region | None]]:
        """Iterate over the guest code that hits run: stub, detour and compiled detour.

        Each item has the entry address, the code, and a region: the text whose copied or relocated form is in
        the code. The region is None if the code contains no such form.
        """
        if self.stub is not None:
            yield self.stub.entry, self.stub, self.stub.region
        if self.detour is not None:
            yield self.detour.address, self.detour, self.detour.region
            if self.compiled is not None:
                yield self.compiled.entry, self.compiled, self.detour.region

    # Members

    @property
    def by_run(self) -> Iterator[Kprobe]:
        """The members in the order in which their handlers run: newest first, and a jprobe last."""
        return reversed(self.members)

    def add(self, kprobe: Kprobe) -> None:
        """Add a member; its handlers run before those of older members.

        A jprobe runs last, because it does not return to the handlers of other members.
        """
        if is_jprobe(kprobe):
            self.members = dict.fromkeys((kprobe, *self.members))
            self.jprobe = kprobe
        elif not self.members:
            self.members = (kprobe,)
        else:
            if isinstance(self.members, tuple):
                self.members = dict.fromkeys(self.members)
            self.members[kprobe] = None
        self._count(kprobe, 1)

    def remove(self, kprobe: Kprobe) -> None:
        """Remove a member, whose handlers do not run any more."""
        if isinstance(self.members, tuple):
            self.members = ()
        else:
            del self.members[kprobe]
        if kprobe is self.jprobe:
            self.jprobe = None
        self._count(kprobe, -1)

    def _count(self, kprobe: Kprobe, change: int) -> None:
        assembled = kprobe._assembled
        self.enabled_members += change * (not kprobe.is_disabled)
        self._with_post_handler += change * has_post_handler(kprobe)
        if assembled is not None:
            self._with_assembly += change * (HandlerPoint.PRE in assembled)
            self._with_post_assembly += change * (HandlerPoint.POST in assembled)

    def refresh_handlers(self) -> None:
        """Update the attributes about handlers, after a change of the members or their flags.

        These are `has_assembly`, `has_post_assembly`, `has_post_handler`, and `pre_call`, which becomes None.
        """
        self.pre_call = None
        self.has_assembly = self._with_assembly > 0
        self.has_post_assembly = self._with_post_assembly > 0
        self.has_post_handler = self._with_post_handler > 0

    def miss(self) -> None:
        """Count a missed hit for each member. Mirrors: kernel/kprobes.c:kprobes_inc_nmissed_count (v6.1)."""
        for kprobe in self.members:
            kprobe.nmissed += 1

    # Handlers in Python

    def _enabled(self) -> list[Kprobe]:
        """Return the enabled members, in the order in which their handlers run."""
        return [kprobe for kprobe in self.by_run if not kprobe.is_disabled]

    def collect(self) -> PreCall:
        """Return `pre_call`: the function that calls the pre_handlers in Python, and its first argument.

        If members may have changed, first collect the Python handlers of the enabled members.
        """
        if self.pre_call is None:
            enabled = self._enabled()
            pre_handlers = [
                (kprobe.pre_handler, kprobe) for kprobe in enabled if kprobe.pre_handler is not None
            ]
            self._pre_handlers = pre_handlers
            self._post_handlers = [
                (_post_call(kprobe.post_handler, kprobe._takes_flags), kprobe)
                for kprobe in enabled
                if kprobe.post_handler is not None
            ]
            is_single = len(pre_handlers) == 1 and self.jprobe is None
            self.pre_call = pre_handlers[0] if is_single else (AggrKprobe.run_pre_handlers, self)
        return self.pre_call

    def run_pre_handlers(self, regs: Regs) -> int | None:
        """Call the members' pre_handlers in Python, up to the first one that returns a true value.

        Return 1 if one of them did so, otherwise None.
        """
        self._stopped_by = None
        for pre_handler, kprobe in self._pre_handlers:
            try:
                if pre_handler(kprobe, regs):
                    self._stopped_by = kprobe
                    return 1
            except BaseException as error:
                self.report(kprobe, error)
        return None

    def run_all_pre_handlers(self, regs: Regs) -> None:
        """Call the pre_handlers of all enabled members in Python, regardless of their results."""
        for pre_handler, kprobe in self._pre_handlers:
            try:
                pre_handler(kprobe, regs)
            except BaseException as error:
                self.report(kprobe, error)

    def run_post_handlers(self, regs: Regs) -> None:
        """Call the members' post_handlers in Python, after the probed instruction."""
        self.collect()
        for post_handler, kprobe in self._post_handlers:
            try:
                post_handler(kprobe, regs)
            except BaseException as error:
                self.report(kprobe, error)

    def run_break_handler(self, regs: Regs) -> int | None:
        """Call the break_handler of the member whose pre_handler returned a true value; return its result.

        If the result is true, the probed instruction runs, and the hit ends. Otherwise the guest continues at
        `regs.ip`.
        """
        kprobe = self._stopped_by
        assert kprobe is not None
        assert kprobe.break_handler is not None
        return kprobe.break_handler(kprobe, regs)

    def run_fault_handler(self, regs: Regs, vector: int) -> bool:
        """Call the members' fault_handlers, up to the first that returns a true value.

        `vector`: number of the exception that they are to handle. The exception occurred while the probed
        instruction was stepped. Return True if a fault_handler has returned a true value, which means that it
        has handled the exception; otherwise False.
        """
        return any(
            kprobe.fault_handler(kprobe, regs, vector)
            for kprobe in self.by_run
            if kprobe.fault_handler is not None
        )

    # Handlers as guest code

    @property
    def has_python_post_handler(self) -> bool:
        """Whether a Python handler runs after the probed instruction."""
        self.collect()
        return bool(self._post_handlers)

    @property
    def nr_handlers(self) -> int:
        """Number of enabled members that have a pre_handler or a handler in assembly."""
        return sum(_has_handler(kprobe) for kprobe in self._enabled())

    @property
    def may_compile(self) -> bool:
        """Whether the compiler may try to compile the handlers to guest code.

        False if an enabled member has a handler that only Python can run, if no enabled member has a
        handler, or if they have more than MAX_HANDLERS. False also if an earlier attempt has failed since
        the last change.
        """
        if self.is_python or not 0 < self.nr_handlers <= MAX_HANDLERS:
            return False
        return not any(_runs_python(kprobe) for kprobe in self._enabled())

    def emit(self, builder: ProgramBuilder, way: EntryKind) -> bool:
        """Emit guest code that runs the handlers at hits of kind `way`.

        Return False if Python must handle these hits. The emitted code is incomplete then.
        """
        if self.has_python_post_handler:
            return False
        for kprobe in self._enabled():
            _emit_assembly(kprobe, builder, HandlerPoint.PRE)
            if kprobe.pre_handler is not None and (
                kprobe.program is None or not kprobe.program(builder, way)
            ):
                return False
        if way is EntryKind.CALL:
            # A call does not step an instruction, so the post_code runs at the end of the call.
            self.emit_assembly(builder, HandlerPoint.POST)
        return True

    def emit_assembly(self, builder: ProgramBuilder, point: HandlerPoint) -> None:
        """Emit the handlers for `point` that users wrote in assembly, for the enabled members.

        Nothing is emitted for the attribute `program` of a member.
        """
        for kprobe in self._enabled():
            _emit_assembly(kprobe, builder, point)

    def miss_assembly(self, point: HandlerPoint) -> None:
        """Count a missed hit for each enabled member that has an assembly handler at `point`."""
        for kprobe in self._enabled():
            if kprobe._assembled is not None and point in kprobe._assembled:
                kprobe.nmissed += 1


def is_jprobe(kprobe: Kprobe) -> bool:
    """Return True if a probe is a jprobe or has a break_handler; its hits may continue elsewhere then."""
    return kprobe._kind == JPROBE or kprobe.break_handler is not None


def has_post_handler(kprobe: Kprobe) -> bool:
    """Return True if a registered probe has a handler that runs after the instruction."""
    assembled = kprobe._assembled
    return kprobe.post_handler is not None or (assembled is not None and HandlerPoint.POST in assembled)


def takes_flags(handler: PostHandler[Any]) -> bool:
    """Return True if a post_handler requires a third argument, which is `flags` in Linux."""
    from inspect import Parameter, signature

    try:
        parameters = signature(handler).parameters.values()
    except (TypeError, ValueError):
        return False
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    return sum(it.kind in positional and it.default is Parameter.empty for it in parameters) == 3


def _post_call(post_handler: Any, takes_flags: bool) -> _PostCall:
    if not takes_flags:
        return post_handler  # type: ignore[no-any-return]
    return lambda kprobe, regs: post_handler(kprobe, regs, 0)


def _has_handler(kprobe: Kprobe) -> bool:
    return kprobe.pre_handler is not None or kprobe._assembled is not None


def _runs_python(kprobe: Kprobe) -> bool:
    return kprobe.pre_handler is not None and kprobe.program is None


def _emit_assembly(kprobe: Kprobe, builder: ProgramBuilder, point: HandlerPoint) -> None:
    assembled: AssembledHandlers | None = kprobe._assembled
    if assembled is not None:
        assembled.emit(builder, point)
