"""Records as guest code: code that stores an entry's common fields and writes the entry to a ring buffer.

ring/ring_layout.py describes the memory that the code writes. The virtual registers (BASE, VALUE and others)
are those of fetch.py.
"""

from __future__ import annotations

from emulated_kernel.arch.program.cpu_words import load_base
from emulated_kernel.arch.program.ir import (
    AddAndFetch,
    AddToPerCpu,
    Arithmetic,
    Branch,
    BranchImmediate,
    BranchPerCpu,
    CallPerCpu,
    Compute,
    ComputeImmediate,
    ComputePerCpu,
    Condition,
    GetRegister,
    IncreasePerCpu,
    Jump,
    Label,
    Load,
    LoadAbsolute,
    LoadPerCpu,
    Move,
    SetImmediate,
    Store,
    StoreImmediate,
    StorePerCpu,
)
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.trace.compiled.fetch import BASE, HIGH, LIMIT, OTHER, POSITION, TEMP, VALUE, chunks
from emulated_kernel.trace.compiled.guest_addresses import GuestAddresses
from emulated_kernel.trace.compiled.next_page import CONTROL, LENGTH, NEXT_PAGE, TIME
from emulated_kernel.trace.context.task_check import PID_SIZE, TaskCheck
from emulated_kernel.trace.ring.buffer_page import DELTA_BITS, MAX_SMALL_DATA, event_size
from emulated_kernel.trace.ring.ring_layout import (
    FLAGS,
    TAIL_ENTRIES,
    WRITE_PTR,
    WRITE_STAMP,
    RecordTarget,
    RingFlag,
)
from emulated_kernel.trace.ring.trace_entry import EntryFlag
from emulated_kernel.util.fast_dataclass import dataclass

ENTRY_HEADER_SIZE = 8
"""Size of an entry's common fields in bytes."""
_CELL = 8
"""Size in bytes of a word of a ring buffer's control block, and of per-CPU variables of the host."""
_PAGE_BITS = 12
"""Number of bits of an offset in a sub-buffer of order 0."""
_FLAGS_SHIFT = 16
_COUNT_SHIFT = 24
_PID_AT = 4
_SOFTIRQ_SERVED = 1 << 8
_COUNT_MASK = 0xFF
_LENGTH = LIMIT
"""Virtual register for the length of an event of variable size; LIMIT is unused after strings are stored."""


@dataclass(frozen=True)
class EventSpace:
    """The bytes that an event takes on a page of a ring buffer, if the size of its entry is known."""

    size: int
    """Size of the entry, in bytes."""

    @property
    def length(self) -> int:
        """Size of the whole event with header and padding, in bytes."""
        return event_size(self.size)

    @property
    def header(self) -> int:
        """Size of the event's header, in bytes."""
        return 4 if self.size <= MAX_SMALL_DATA else 8


class RecordEmitter:
    """Emits code that stores the common fields of an entry, and that writes entries to ring buffers."""

    def __init__(
        self, builder: ProgramBuilder, places: GuestAddresses, word_size: int, *, by_breakpoint: bool = False
    ) -> None:
        """Prepare to emit ops to `builder`.

        `by_breakpoint`: whether Linux handles the hit in the exception of a breakpoint.
        """
        self._builder = builder
        self._emit = builder.emit
        self._places = places
        self._by_breakpoint = by_breakpoint
        self._word = word_size
        self._high = HIGH if word_size < _CELL else None

    def scratch(self) -> None:
        """Emit code that sets BASE to the address of the CPU's scratch memory for entries."""
        self._emit(
            *load_base(BASE, self._places.this_cpu_off, self._places.scratch, self._word),
        )

    # Lists of pids

    def check_task(self, check: TaskCheck, excluded: Label) -> None:
        """Emit code that jumps to `excluded` if the lists of pids exclude the current task.

        `check`: the per-CPU memory in which the code looks up the task; if the task is not found, the code
        asks the host.

        The code overwrites TEMP and OTHER.
        """
        builder = self._builder
        emit = self._emit
        known = builder.label()
        with builder.out_of_line() as other:
            emit(
                LoadPerCpu(OTHER, check.excluded, PID_SIZE),
                Branch(Condition.EQ, TEMP, OTHER, excluded),
            )
            builder.call_host(check.is_recorded, excluded)
            emit(Jump(known))
        emit(
            self._places.cpu.load_task(TEMP),
            Load(TEMP, TEMP, self._places.pid, PID_SIZE),
            LoadPerCpu(OTHER, check.recorded, PID_SIZE),
            Branch(Condition.NE, TEMP, OTHER, other),
        )
        builder.place(known)

    # Common fields

    def common_fields(self, at: int, event_id: int, target: RecordTarget | None, more_count: int = 0) -> None:
        """Emit code that stores the 8 bytes of common fields at BASE + at; common_type is `event_id`.

        `target`: the buffers in which the entry is certain to be recorded; None if this is not certain, for
        example because a filter may reject the entry. If `target` is given and its `saves_comm` is set, the
        code also saves the task's name. `more_count` is added to the preempt count, except at a breakpoint
        that Linux handles as an NMI.
        """
        places = self._places
        emit = self._emit
        emit(
            places.cpu.load_task(VALUE),
            Load(VALUE, VALUE, places.pid, 4),
            Store(BASE, at + _PID_AT, VALUE, 4),
        )
        saves_comm = target is not None and target.saves_comm
        if self._by_breakpoint and places.breakpoint_context is not None:
            if saves_comm:
                self._remember_comm()
            flags, count = places.breakpoint_context
            emit(StoreImmediate(BASE, at, event_id | flags << _FLAGS_SHIFT | count << _COUNT_SHIFT, 4))
            return
        usual = event_id | more_count << _COUNT_SHIFT
        if self._by_breakpoint or not places.has_interrupt_mask:
            usual |= EntryFlag.IRQS_OFF << _FLAGS_SHIFT
        builder = self._builder
        known = builder.label()
        with builder.out_of_line() as unusual:
            if saves_comm:
                emit(Load(VALUE, BASE, at + _PID_AT, 4))
                self._remember_comm()
            emit(SetImmediate(VALUE, usual))
            self._add_context()
            emit(Jump(known))
        self._branch_unless_usual(unusual, saves_comm=saves_comm)
        emit(SetImmediate(VALUE, usual))
        builder.place(known)
        if not self._by_breakpoint:
            self._invert_irqs_off()
        emit(Store(BASE, at, VALUE, 4))

    def _remember_comm(self) -> None:
        """Emit code that saves the current task's name, unless it was the last one that this CPU saved.

        When the code runs, VALUE must hold the task's pid.
        """
        builder = self._builder
        places = self._places
        known = builder.label()
        with builder.out_of_line() as unknown:
            builder.call_host(places.save_comm, known)
            self._emit(Jump(known))
        self._emit(
            LoadPerCpu(TEMP, places.last_pid, 4),
            Branch(Condition.NE, TEMP, VALUE, unknown),
        )
        builder.place(known)

    def _add_context(self) -> None:
        """Emit code that adds common_flags and common_preempt_count to VALUE, as HitContext computes them.

        The code does not change the flag IRQS_OFF; see _invert_irqs_off().
        Mirrors: kernel/trace/trace.c:tracing_gen_ctx_irq_test (v6.1).
        """
        emit = self._emit
        places = self._places
        emit(
            *places.cpu.load_count(TEMP),
            ComputeImmediate(Arithmetic.AND, TEMP, _COUNT_MASK),
            ComputeImmediate(Arithmetic.SHL, TEMP, _COUNT_SHIFT),
            Compute(Arithmetic.ADD, VALUE, TEMP),
        )
        self._add_resched_flags()
        emit(*places.cpu.load_count(TEMP))
        self._add_flag(Condition.ANY_BIT, places.hardirq_mask, EntryFlag.HARDIRQ)
        self._add_flag(Condition.ANY_BIT, _SOFTIRQ_SERVED, EntryFlag.SOFTIRQ)
        self._add_flag(Condition.ANY_BIT, places.softirq_mask & ~_SOFTIRQ_SERVED, EntryFlag.BH_OFF)

    def _invert_irqs_off(self) -> None:
        """Emit code that inverts IRQS_OFF in VALUE if the bit of GuestAddresses.interrupt_flag is set."""
        flags, interrupts = self._places.interrupt_flag
        irqs_off = EntryFlag.IRQS_OFF << _FLAGS_SHIFT
        self._emit(
            GetRegister(TEMP, flags),
            ComputeImmediate(Arithmetic.AND, TEMP, interrupts),
            ComputeImmediate(Arithmetic.SHL, TEMP, irqs_off.bit_length() - interrupts.bit_length()),
            Compute(Arithmetic.XOR, VALUE, TEMP),
        )

    def _add_resched_flags(self) -> None:
        """Emit code that adds the flags NEED_RESCHED and PREEMPT_RESCHED to VALUE.

        The code does the same as resched_flags() of HitContext.
        """
        emit = self._emit
        places = self._places
        resched = self._places.resched
        both = EntryFlag.NEED_RESCHED | EntryFlag.PREEMPT_RESCHED
        if places.need_resched is not None:
            emit(LoadPerCpu(TEMP, places.need_resched, 4))
            if resched.task_flag is None:
                self._add_flag(Condition.NE, 0, both)
                return
            emit(ComputeImmediate(Arithmetic.ADD, TEMP, -resched.not_needed))
            self._add_flag(Condition.ANY_BIT, -resched.not_needed, EntryFlag.PREEMPT_RESCHED)
            both = EntryFlag.NEED_RESCHED
        assert resched.task_flag is not None, "the need to reschedule is somewhere"
        self._emit_task_flags(TEMP, resched.task_flag[0])
        self._add_flag(Condition.ANY_BIT, resched.task_flag[1], both)

    def _emit_task_flags(self, register: int, offset: int) -> None:
        self._emit(self._places.cpu.load_task(register), Load(register, register, offset, 4))

    def _branch_unless_usual(self, unusual: Label, *, saves_comm: bool) -> None:
        """Emit code that jumps to `unusual`, unless the preempt count is 0 and no rescheduling is needed.

        `saves_comm`: the code also jumps if VALUE is not the pid of the task whose name was saved last. If it
        is not set, VALUE is not tested. The code overwrites VALUE, TEMP and OTHER. The code has one branch
        for all conditions, because a branch ends a block of translated code.
        """
        emit = self._emit
        resched = self._places.resched
        if self._places.need_resched is None:
            emit(*self._places.cpu.load_count(TEMP))
        else:
            self._emit_count_and_need(self._places.need_resched)
        if resched.task_flag is not None:
            offset, bit = resched.task_flag
            self._emit_task_flags(OTHER, offset)
            emit(ComputeImmediate(Arithmetic.AND, OTHER, bit), Compute(Arithmetic.OR, TEMP, OTHER))
        if saves_comm:
            emit(
                ComputePerCpu(Arithmetic.XOR, VALUE, self._places.last_pid),
                Compute(Arithmetic.OR, TEMP, VALUE),
            )
        emit(BranchImmediate(Condition.NE, TEMP, 0, unusual))

    def _emit_count_and_need(self, need_resched: int) -> None:
        """Emit code that sets TEMP to 0 if and only if preempt_count is 0 and no reschedule is needed.

        `need_resched`: per-CPU offset of the u32 that shows whether a reschedule is needed.
        """
        emit = self._emit
        not_needed = self._places.resched.not_needed
        (offset, size), *others = self._count_loads(need_resched)
        emit(LoadPerCpu(TEMP, offset, size))
        if not_needed:
            emit(ComputeImmediate(Arithmetic.ADD, TEMP, -not_needed))
        for offset, size in others:
            if size == self._word:
                emit(ComputePerCpu(Arithmetic.OR, TEMP, offset))
            else:
                emit(LoadPerCpu(OTHER, offset, size), Compute(Arithmetic.OR, TEMP, OTHER))

    def _count_loads(self, need_resched: int) -> list[tuple[int, int]]:
        """Return per-CPU offset and size in bytes of each load that reads preempt_count and need_resched.

        One load is enough if both are the same u32, or if they are adjacent and a word has 8 bytes.
        """
        first, second = sorted((self._places.cpu.preempt_count, need_resched))
        if first == second:
            return [(first, 4)]
        return [(first, 8)] if second == first + 4 and self._word == 8 else [(first, 4), (second, 4)]

    def _add_flag(self, condition: Condition, value: int, flags: EntryFlag) -> None:
        """Emit code that sets `flags` in VALUE if TEMP fulfils `condition` with `value`."""
        builder = self._builder
        skip = builder.label()
        add = builder.label()
        self._emit(BranchImmediate(condition, TEMP, value, add), Jump(skip))
        builder.place(add)
        self._emit(ComputeImmediate(Arithmetic.OR, VALUE, int(flags) << _FLAGS_SHIFT))
        builder.place(skip)

    # Writing

    def reserve(self, pointer: int, length: int | None, target: RecordTarget, dropped: Label) -> None:
        """Emit code that reads the clock and reserves `length` bytes for an event in the CPU's ring buffer.

        The code sets the register `pointer` to the address of the event, and VALUE to the event's time delta.
        The code overwrites TEMP. If `length` is None, the length is in _LENGTH. If the event is dropped, the
        code jumps to `dropped`.
        """
        self.read_clock()
        self.reserve_then(pointer, length, target, dropped)

    def read_clock(self) -> None:
        """Emit code that advances the guest's clock by a step and sets VALUE to the time.

        If a word has 4 bytes, the code sets HIGH to the time's upper half.
        Hazard: with the model clock, the word with the time changes before each instruction. On arm64, a loop
        of exclusive loads and stores on this word would never end. So a reading that does not advance the
        clock is a plain load.
        """
        places = self._places
        step = places.time.step_ns
        if step == 0 and self._high is None:
            self._emit(LoadAbsolute(VALUE, places.clock, _CELL))
        else:
            self._emit(AddAndFetch(VALUE, places.clock, step, self._high))

    def reserve_then(self, pointer: int, length: int | None, target: RecordTarget, dropped: Label) -> None:
        """Emit the code of reserve(), but without the code that reads the clock.

        When the code runs, VALUE and HIGH must hold the current time. The parameters are those of reserve().
        """
        builder = self._builder
        emit = self._emit
        stamp = target.control_at + WRITE_STAMP
        page_bits = _PAGE_BITS + target.order
        again = builder.label()
        with builder.out_of_line() as no_room:
            emit(ComputePerCpu(Arithmetic.ADD, VALUE, stamp, self._high))
            self._ask_for_room(length, target, again, dropped)
            emit(Jump(again))
        builder.place(again)
        emit(
            LoadPerCpu(pointer, target.control_at + WRITE_PTR, self._word),
            Move(TEMP, pointer),
            ComputeImmediate(Arithmetic.ADD, TEMP, -1),
            ComputeImmediate(Arithmetic.AND, TEMP, (1 << page_bits) - 1),
        )
        if length is None:
            emit(Compute(Arithmetic.ADD, TEMP, _LENGTH))
        else:
            emit(ComputeImmediate(Arithmetic.ADD, TEMP, length))
        # One branch checks the room and the delta: if there is no room, the sum has a bit above page_bits.
        emit(
            ComputeImmediate(Arithmetic.SHL, TEMP, DELTA_BITS - page_bits),
            ComputePerCpu(Arithmetic.SUB, VALUE, stamp, self._high),
        )
        if self._high is not None:
            emit(BranchImmediate(Condition.NE, self._high, 0, no_room))
        emit(
            Compute(Arithmetic.OR, TEMP, VALUE),
            BranchImmediate(Condition.ABOVE_EQ, TEMP, 1 << DELTA_BITS, no_room),
            IncreasePerCpu(stamp, VALUE),
        )

    def _ask_for_room(self, length: int | None, target: RecordTarget, again: Label, dropped: Label) -> None:
        """Emit code that makes room for an event whose time is in VALUE and HIGH.

        `length`: size of the event in bytes; if it is None, the size is in _LENGTH. The code first calls the
        guest code of next_page.py. If this makes room, the code jumps to `again`; otherwise it calls the
        host. If the event is dropped, the code jumps to `dropped`. If the host makes room, execution
        continues after the emitted code.
        """
        emit = self._emit
        request = self._places.request
        emit(
            BranchPerCpu(Condition.ANY_BIT, target.control_at + FLAGS, 4, RingFlag.DISABLED, dropped),
            StorePerCpu(request + TIME, VALUE, self._word),
        )
        if self._high is not None:
            emit(StorePerCpu(request + TIME + self._word, self._high, self._word))
        length_at = request + LENGTH
        if length is None:
            emit(StorePerCpu(length_at, _LENGTH, self._word))
        else:
            emit(SetImmediate(TEMP, length), StorePerCpu(length_at, TEMP, self._word))
        not_compiled = self._builder.label()
        emit(
            BranchPerCpu(Condition.EQ, request + NEXT_PAGE, self._word, 0, not_compiled),
            *load_base(TEMP, self._places.this_cpu_off, target.control_at, self._word),
            StorePerCpu(request + CONTROL, TEMP, self._word),
            CallPerCpu(request + NEXT_PAGE),
            BranchPerCpu(Condition.EQ, length_at, 4, 0, again),
        )
        self._builder.place(not_compiled)
        self._builder.call_host(target.make_room, dropped)

    def header(self, pointer: int, space: EventSpace) -> None:
        """Emit code that stores an event's header and padding.

        `pointer`: register with the event's address. When the code runs, VALUE must be the event's time
        delta.
        """
        emit = self._emit
        emit(ComputeImmediate(Arithmetic.SHL, VALUE, 5))
        if space.header == 4:
            emit(ComputeImmediate(Arithmetic.OR, VALUE, (space.length - 4) >> 2))
        emit(Store(pointer, 0, VALUE, 4))
        if space.header == 8:
            emit(StoreImmediate(pointer, 4, space.length - 4, 4))
        if space.size % 4 or space.header + space.size < space.length:
            emit(StoreImmediate(pointer, space.length - 4, 0, 4))

    def commit(self, pointer: int, length: int | None, target: RecordTarget) -> None:
        """Emit code that commits an event: it counts the event and advances the buffer's write pointer.

        `pointer`: register with the event's address, which the code overwrites. `length`: size of the event
        in bytes; if it is None, the size is in _LENGTH.
        """
        control = target.control_at
        self._emit(AddToPerCpu(control + TAIL_ENTRIES, 1, _CELL))
        if length is None:
            self._emit(Compute(Arithmetic.ADD, pointer, _LENGTH))
        else:
            self._emit(ComputeImmediate(Arithmetic.ADD, pointer, length))
        self._emit(StorePerCpu(control + WRITE_PTR, pointer, self._word))

    # Entries that were assembled in scratch memory

    def copy(self, fixed: int, *, dynamic: bool, target: RecordTarget, dropped: Label) -> None:
        """Emit code that copies the entry from scratch memory at BASE to the ring buffer of `target`.

        The entry has `fixed` bytes. If `dynamic` is set, strings follow, which end at POSITION. If the event
        is dropped, the code jumps to `dropped`.
        """
        space = EventSpace(fixed)
        length = None if dynamic else space.length
        if dynamic:
            self._measure()
        self.reserve(OTHER, length, target, dropped)
        if dynamic:
            self._dynamic_header()
            self._copy_all(fixed)
        else:
            self.header(OTHER, space)
            self._copy_fixed(space)
        if target.saves_comm:
            self._emit(Load(VALUE, BASE, _PID_AT, 4))
            self._remember_comm()
        self.commit(OTHER, length, target)

    def _measure(self) -> None:
        """Emit code that sets _LENGTH to the size of the entry's event, and pads the entry with zeros.

        The size is in bytes, with the event's header. The code computes the same size as event_size().
        """
        builder = self._builder
        emit = self._emit
        small = builder.label()
        emit(
            StoreImmediate(POSITION, 0, 0, 4),
            Move(_LENGTH, POSITION),
            Compute(Arithmetic.SUB, _LENGTH, BASE),
            BranchImmediate(Condition.BELOW_EQ, _LENGTH, MAX_SMALL_DATA, small),
            ComputeImmediate(Arithmetic.ADD, _LENGTH, 4),
        )
        builder.place(small)
        emit(
            ComputeImmediate(Arithmetic.ADD, _LENGTH, 4 + 3),
            ComputeImmediate(Arithmetic.AND, _LENGTH, -4),
        )

    def _dynamic_header(self) -> None:
        """Emit code that stores the header of an event of variable size at the address in OTHER.

        When the code runs, VALUE must be the event's time delta and _LENGTH its size in bytes. The code sets
        VALUE to the address of the event's data.
        """
        builder = self._builder
        emit = self._emit
        small = builder.label()
        done = builder.label()
        emit(
            ComputeImmediate(Arithmetic.SHL, VALUE, 5),
            Move(TEMP, _LENGTH),
            ComputeImmediate(Arithmetic.ADD, TEMP, -4),
            BranchImmediate(Condition.BELOW_EQ, TEMP, MAX_SMALL_DATA, small),
            Store(OTHER, 0, VALUE, 4),
            Store(OTHER, 4, TEMP, 4),
            Move(VALUE, OTHER),
            ComputeImmediate(Arithmetic.ADD, VALUE, 8),
            Jump(done),
        )
        builder.place(small)
        emit(
            ComputeImmediate(Arithmetic.SHR, TEMP, 2),
            Compute(Arithmetic.OR, VALUE, TEMP),
            Store(OTHER, 0, VALUE, 4),
            Move(VALUE, OTHER),
            ComputeImmediate(Arithmetic.ADD, VALUE, 4),
        )
        builder.place(done)

    def _copy_all(self, fixed: int) -> None:
        """Emit code that copies the entry from BASE to VALUE: `fixed` bytes unrolled, strings in a loop.

        The loop changes BASE. The code restores BASE at the end.
        """
        builder = self._builder
        emit = self._emit
        again = builder.label()
        copied = builder.label()
        word = self._word
        straight = fixed & -word
        for at in range(0, straight, word):
            emit(Load(TEMP, BASE, at, word), Store(VALUE, at, TEMP, word))
        emit(
            ComputeImmediate(Arithmetic.ADD, BASE, straight),
            ComputeImmediate(Arithmetic.ADD, VALUE, straight),
            Branch(Condition.ABOVE_EQ, BASE, POSITION, copied),
        )
        builder.place(again)
        emit(
            Load(TEMP, BASE, 0, 4),
            Store(VALUE, 0, TEMP, 4),
            ComputeImmediate(Arithmetic.ADD, BASE, 4),
            ComputeImmediate(Arithmetic.ADD, VALUE, 4),
            Branch(Condition.BELOW, BASE, POSITION, again),
        )
        builder.place(copied)
        self.scratch()

    def _copy_fixed(self, space: EventSpace) -> None:
        for at, piece in chunks(space.size, self._word):
            self._emit(Load(TEMP, BASE, at, piece), Store(OTHER, space.header + at, TEMP, piece))
