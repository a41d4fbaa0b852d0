"""The function_graph tracer as guest code, which selects calls and records their entries and returns.

The virtual registers (BASE, VALUE and others) are those of fetch.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from enum import Enum, IntFlag, auto
from struct import Struct

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.int64_on_32 import branch_long
from emulated_kernel.arch.program.ir import (
    Arithmetic,
    Branch,
    BranchImmediate,
    Compute,
    ComputeImmediate,
    Condition,
    Jump,
    Label,
    Load,
    LoadPerCpu,
    Move,
    SetImmediate,
    Store,
    StoreImmediate,
)
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.codegen.call_site import get_called
from emulated_kernel.kprobes.return_hook.compiled_returns import NativeReturns
from emulated_kernel.kprobes.return_hook.return_hook import ReturnHook
from emulated_kernel.kprobes.return_hook.stack_code import NODE
from emulated_kernel.trace.compiled.calls import SelectedTasks
from emulated_kernel.trace.compiled.fetch import BASE, HIGH, LIMIT, OTHER, POSITION, TEMP, VALUE
from emulated_kernel.trace.compiled.guest_addresses import GuestAddresses
from emulated_kernel.trace.compiled.record import ENTRY_HEADER_SIZE, EventSpace, RecordEmitter
from emulated_kernel.trace.ring.ring_layout import WRITE_STAMP, RecordTarget
from emulated_kernel.trace.ring.trace_entry import EntryType
from emulated_kernel.util.fast_dataclass import dataclass

FRAME = Struct("<QQiI")
"""Format of the data that the shadow stack has about a call: function, start time (ns), depth, CallFlag."""
CALLED = 8
"""Offset in bytes of the call's start time in the data that tracer and profiler keep on the shadow stack."""
_FUNC = 0
_DEPTH = 16
_FLAGS = 20
# Virtual registers while a call begins or ends.
_CALL = POSITION
"""Number of the virtual register with the address of the call's data (see FRAME)."""
_CALL_DEPTH = LIMIT
"""Number of the virtual register with the depth of the call."""
_CALL_FLAGS = HIGH
"""Number of the virtual register with the call's CallFlag.

After the flags are stored, the register holds upper halves of times.
"""
_CELL = 8
_HALF = 4
_INT_MAX = (1 << 31) - 1


class CallFlag(IntFlag):
    """Flags of a traced call, stored in the call's data on the shadow stack (see FRAME)."""

    HIDDEN = 1
    """The function is in set_graph_notrace. Neither its call nor the calls that it makes are recorded."""
    IN_IRQ = 2
    """The call was made in a hard interrupt."""


class CallKind(Enum):
    """How the tracer treats the calls of a function. Functions of one kind share their guest code.

    PLAIN: the function is in neither set_graph_function nor set_graph_notrace. A function that is in both is
    HIDDEN.
    """

    PLAIN = auto()
    CHOSEN = auto()
    """The function is in set_graph_function."""
    HIDDEN = auto()
    """The function is in set_graph_notrace."""


@dataclass(frozen=True)
class CompiledGraph:
    """The settings of the function_graph tracer on which its guest code depends."""

    target: RecordTarget
    entry_count: int
    """Amount that ftrace's guard against recursion adds to the preempt count in a call's GRAPH_ENT record."""
    chosen: frozenset[int]
    """Fentry sites of the functions in set_graph_function.

    The attribute `hidden` has the fentry sites of the functions in set_graph_notrace.
    """
    hidden: frozenset[int]
    depth_size: int
    """Size in bytes of the depth in a call's GRAPH_ENT record."""
    max_depth: int
    threshold_ns: int
    takes_irqs: bool
    tasks: SelectedTasks

    def by_kind(self, sites: AbstractSet[int]) -> Mapping[CallKind, AbstractSet[int]]:
        """Divide fentry sites by the kind of their functions.

        Return a map: kind -> sites. It has only the kinds that have sites.
        """
        hidden = sites & self.hidden
        chosen = sites & self.chosen - hidden
        kinds = {
            CallKind.PLAIN: sites - chosen - hidden if chosen or hidden else sites,
            CallKind.CHOSEN: chosen,
            CallKind.HIDDEN: hidden,
        }
        return {kind: found for kind, found in kinds.items() if found}


class GraphEmitter:
    """Emits code that records the entries and returns of calls, as GraphTracer does on the host."""

    def __init__(
        self,
        builder: ProgramBuilder,
        compiled: CompiledGraph,
        native: NativeReturns,
        hook: ReturnHook,
        places: GuestAddresses,
        arch: Arch,
    ) -> None:
        self._builder = builder
        self._emit = builder.emit
        self._compiled = compiled
        self._native = native
        self._hook = hook
        self._places = places
        self._arch = arch
        self._word = arch.word_size

    # Entries

    def entry(self, kind: CallKind) -> None:
        """Emit code that hooks a call: it puts the call on the shadow stack, and records GRAPH_ENT.

        `kind`: that of the called function. If the settings or the caller exclude the call, it is neither
        hooked nor recorded. A hidden call is hooked without a record. So is each call if tracing_thresh is
        set.

        Mirrors: kernel/trace/fgraph.c:function_graph_enter,
        kernel/trace/trace_functions_graph.c:trace_graph_entry (v6.1).
        """
        self._native.emit_graph_entry(self._builder, self._hook, lambda unwanted: self._keep(kind, unwanted))

    def _keep(self, kind: CallKind, unwanted: Label) -> None:
        builder = self._builder
        emit = self._emit
        compiled = self._compiled
        places = self._places
        emit(Move(_CALL, NODE))
        self._look_at_caller(kind, unwanted)
        if kind is CallKind.HIDDEN:
            emit(SetImmediate(_CALL_FLAGS, CallFlag.HIDDEN))
        else:
            compiled.tasks.emit_check(builder, places, unwanted)
            if 0 < compiled.max_depth <= _INT_MAX:
                emit(BranchImmediate(Condition.ABOVE_EQ, _CALL_DEPTH, compiled.max_depth, unwanted))
            known = builder.label()
            with builder.out_of_line() as in_irq:
                if kind is CallKind.PLAIN and not compiled.takes_irqs:
                    emit(BranchImmediate(Condition.NO_BIT, _CALL_FLAGS, CallFlag.IN_IRQ, unwanted))
                emit(SetImmediate(_CALL_FLAGS, CallFlag.IN_IRQ), Jump(known))
            emit(
                *places.cpu.branch_if_count(Condition.ANY_BIT, places.hardirq_mask, in_irq, TEMP),
                SetImmediate(_CALL_FLAGS, 0),
            )
            builder.place(known)
        get_called(builder, self._arch, TEMP)
        emit(Store(_CALL, _FUNC, TEMP, self._word))
        if self._word < _CELL:
            emit(StoreImmediate(_CALL, _FUNC + self._word, 0, _HALF))
        emit(Store(_CALL, _DEPTH, _CALL_DEPTH, 4), Store(_CALL, _FLAGS, _CALL_FLAGS, 4))
        if kind is CallKind.HIDDEN:
            emit(StoreImmediate(_CALL, CALLED, 0, _CELL))
            return
        record = RecordEmitter(builder, places, self._word)
        record.read_clock()
        emit(Store(_CALL, CALLED, VALUE, self._word))
        if self._word < _CELL:
            emit(Store(_CALL, CALLED + _HALF, HIGH, _HALF))
        if not compiled.threshold_ns:
            self._record(record, EntryType.GRAPH_ENT, self._word + compiled.depth_size)

    def _look_at_caller(self, kind: CallKind, unwanted: Label) -> None:
        """Emit code that computes the call's depth and flags from those of the innermost traced caller.

        If the caller is hidden, the code jumps to `unwanted`, and the call is not recorded. It also does so
        if there is no traced caller, set_graph_function has functions, and `kind` is PLAIN.
        """
        builder = self._builder
        emit = self._emit
        none = unwanted if kind is CallKind.PLAIN and self._compiled.chosen else builder.label()
        emit(Move(VALUE, _CALL), SetImmediate(_CALL_DEPTH, 0), SetImmediate(_CALL_FLAGS, 0))
        self._native.graph_code.older(builder, self._hook.address, VALUE, (BASE, TEMP, OTHER), none)
        emit(
            Load(_CALL_DEPTH, VALUE, _DEPTH, 4),
            ComputeImmediate(Arithmetic.ADD, _CALL_DEPTH, 1),
            Load(_CALL_FLAGS, VALUE, _FLAGS, 4),
            BranchImmediate(Condition.ANY_BIT, _CALL_FLAGS, CallFlag.HIDDEN, unwanted),
        )
        if none is not unwanted:
            builder.place(none)

    # Returns

    def ends(self) -> None:
        """Emit code that records the return of a traced call, unless hidden or shorter than tracing_thresh.

        Mirrors: kernel/trace/trace_functions_graph.c:trace_graph_return, trace_graph_thresh_return (v6.1).
        """
        builder = self._builder
        emit = self._emit
        done = builder.label()
        # The frame was popped from the shadow stack. It is intact until the next call overwrites it.
        emit(
            Move(_CALL, NODE),
            Load(TEMP, _CALL, _FLAGS, 4),
            BranchImmediate(Condition.ANY_BIT, TEMP, CallFlag.HIDDEN, done),
        )
        record = RecordEmitter(builder, self._places, self._word)
        record.read_clock()
        if self._compiled.threshold_ns:
            self._check_duration(done)
        self._record(record, EntryType.GRAPH_RET, self._word + 4 + 4 + 2 * _CELL)
        builder.place(done)

    def _check_duration(self, shorter: Label) -> None:
        """Emit code that jumps to `shorter` if the call's duration is below tracing_thresh.

        When the code runs, VALUE and HIGH must hold the current time.
        """
        builder = self._builder
        emit = self._emit
        threshold = self._compiled.threshold_ns
        emit(Move(OTHER, VALUE), Load(TEMP, _CALL, CALLED, self._word))
        if self._word == _CELL:
            emit(
                Compute(Arithmetic.SUB, OTHER, TEMP),
                SetImmediate(TEMP, threshold),
                Branch(Condition.BELOW, OTHER, TEMP, shorter),
            )
            return
        no_borrow = builder.label()
        emit(
            Move(LIMIT, HIGH),
            Branch(Condition.ABOVE_EQ, OTHER, TEMP, no_borrow),
            ComputeImmediate(Arithmetic.ADD, LIMIT, -1),
        )
        builder.place(no_borrow)
        emit(
            Compute(Arithmetic.SUB, OTHER, TEMP),
            Load(TEMP, _CALL, CALLED + _HALF, _HALF),
            Compute(Arithmetic.SUB, LIMIT, TEMP),
        )
        branch_long(builder, Condition.BELOW, OTHER, LIMIT, TEMP, threshold, shorter)

    # Records

    def _record(self, record: RecordEmitter, kind: EntryType, size: int) -> None:
        """Emit code that records an entry of type `kind` (GRAPH_ENT or GRAPH_RET).

        The entry has `size` bytes after its common fields. When the code runs, VALUE and HIGH must hold the
        current time.
        """
        builder = self._builder
        emit = self._emit
        word = self._word
        target = self._compiled.target
        dropped = builder.label()
        space = EventSpace(ENTRY_HEADER_SIZE + size)
        record.reserve_then(BASE, space.length, target, dropped)
        record.header(BASE, space)
        more_count = self._compiled.entry_count if kind is EntryType.GRAPH_ENT else 0
        record.common_fields(space.header, kind, target, more_count)
        at = space.header + ENTRY_HEADER_SIZE
        emit(Load(TEMP, _CALL, _FUNC, word), Store(BASE, at, TEMP, word))
        depth_size = self._compiled.depth_size if kind is EntryType.GRAPH_ENT else 4
        emit(Load(TEMP, _CALL, _DEPTH, 4), Store(BASE, at + word, TEMP, depth_size))
        if kind is EntryType.GRAPH_RET:
            emit(*self._native.graph_code.load_overruns(TEMP), Store(BASE, at + word + 4, TEMP, 4))
            at += word + 8
            for part in range(0, _CELL, word):
                emit(Load(TEMP, _CALL, CALLED + part, word), Store(BASE, at + part, TEMP, word))
                # WRITE_STAMP of the buffer is the time of the event that was just reserved.
                stamp = target.control_at + WRITE_STAMP + part
                emit(LoadPerCpu(TEMP, stamp, word), Store(BASE, at + _CELL + part, TEMP, word))
        record.commit(BASE, space.length, target)
        builder.place(dropped)
