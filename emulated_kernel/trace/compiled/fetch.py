"""Fetch arguments as guest code: what each fetch type does at a hit, in ops of a handler program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.int64_on_32 import shift_left, shift_right
from emulated_kernel.arch.program.ir import (
    Arithmetic,
    Branch,
    BranchImmediate,
    Compute,
    ComputeImmediate,
    Condition,
    GetRegister,
    Jump,
    Label,
    Load,
    LoadPerCpu,
    Move,
    SetImmediate,
    Store,
    StoreImmediate,
)
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.trace.compiled.guest_addresses import GuestAddresses
from emulated_kernel.trace.fetch.fetch_insn import FetchInsn, FetchOp, FetchProgram
from emulated_kernel.trace.fetch.fetch_types import (
    MAX_STRING_SIZE,
    FetchType,
    Hexadecimal,
    Number,
    String,
    SymbolType,
    UserString,
)
from emulated_kernel.trace.fetch.fetchargs import ProbeArg
from emulated_kernel.trace.ring.buffer_page import MAX_DATA_SIZE

BASE, VALUE, TEMP, OTHER, POSITION, LIMIT, HIGH = range(7)
"""Virtual registers: address of the entry (or of its room), the value being fetched, two temporaries, address
behind the strings stored so far, address that a string being copied may reach, upper half of a u64 where a
word has 4 bytes.

TEMP, OTHER and HIGH are free wherever an argument begins; numbers leave POSITION and LIMIT alone.
"""
MAX_ELEMENTS = 256
"""Of all arguments of an event; more would be too much code."""


def fits_displacement(value: int) -> bool:
    """Whether a number is one of 32 bits with sign."""
    return -(1 << 31) <= value < 1 << 31


def can_fetch(args: Sequence[ProbeArg], registers: frozenset[str]) -> bool:
    """Whether guest code can fetch the arguments; `registers` are those that it can read."""
    if sum(arg.count or 1 for arg in args) > MAX_ELEMENTS:
        return False
    return all(
        type(arg.type) in _EMITTERS
        and (arg.stages.load.op is not FetchOp.REG or arg.stages.load.name in registers)
        for arg in args
    )


class FetchEmitter:
    """Emits the fetching of one event's arguments at one probed address."""

    def __init__(
        self, builder: ProgramBuilder, arch: Arch, places: GuestAddresses, address: int, way: EntryKind
    ) -> None:
        self._builder = builder
        self._emit = builder.emit
        self._arch = arch
        self._places = places
        self._address = address
        self._word = arch.word_size
        self._is_return = way is EntryKind.RETURN
        pushes = way in (EntryKind.CALL, EntryKind.RETURN) and arch.registers.link is None
        self._below = self._word if pushes else 0
        """Bytes on the stack that the probed code doesn't know of."""

    def store(self, args: Sequence[ProbeArg], start: int, too_large: Label) -> None:
        """Store all arguments from BASE + start on, the strings at POSITION, which they move on.

        Goes to `too_large` when the entry at BASE gets larger than any ring buffer takes.
        """
        for arg in args:
            _EMITTERS[type(arg.type)](self, arg, start + arg.offset, too_large)

    def store_return_address(self, at: int) -> None:
        """At BASE + at, of a function that returns."""
        self._return_address()
        self._emit(Store(BASE, at, VALUE, self._word))

    def _return_address(self) -> None:
        arch = self._arch
        self._emit(GetRegister(VALUE, arch.registers.sp), Load(VALUE, VALUE, arch.returned_at, self._word))

    # Stages 1 and 2: VALUE

    def _load(self, insn: FetchInsn) -> None:
        match insn.op:
            case FetchOp.REG | FetchOp.STACKP | FetchOp.RETVAL:
                self._register(insn.name)
            case FetchOp.STACK:
                self._stack_word(insn.value)
            case FetchOp.COMM:
                self._emit(LoadPerCpu(VALUE, self._places.current_task, self._word))
                self._emit(ComputeImmediate(Arithmetic.ADD, VALUE, self._places.comm))
            case _:
                self._emit(SetImmediate(VALUE, insn.value))

    def _register(self, name: str) -> None:
        if name == "ip" and self._is_return:
            self._return_address()
        elif name == "ip":
            # As a breakpoint leaves it.
            self._emit(SetImmediate(VALUE, self._address + self._arch.seen_ip))
        else:
            self._emit(GetRegister(VALUE, name))
            if name == self._arch.registers.sp and self._below:
                self._emit(ComputeImmediate(Arithmetic.ADD, VALUE, self._below))

    def _stack_word(self, number: int) -> None:
        """0 outside the kernel stack."""
        builder = self._builder
        done = builder.label()
        with builder.out_of_line() as outside:
            self._emit(SetImmediate(VALUE, 0), Jump(done))
        self._register(self._arch.registers.sp)
        self._emit(
            Move(TEMP, VALUE),
            ComputeImmediate(Arithmetic.ADD, VALUE, number * self._word),
            Compute(Arithmetic.XOR, TEMP, VALUE),
            ComputeImmediate(Arithmetic.AND, TEMP, -self._arch.thread_size),
            BranchImmediate(Condition.NE, TEMP, 0, outside),
            Load(VALUE, VALUE, 0, self._word, on_fault=outside),
        )
        builder.place(done)

    def _follow(self, derefs: FetchProgram, fault: Label) -> None:
        for insn in derefs:
            self._read(VALUE, insn.value, self._word, insn.op is FetchOp.UDEREF, fault)

    def _read(self, dst: int, offset: int, size: int, user: bool, fault: Label) -> None:
        """dst = memory at VALUE + offset; OTHER is overwritten if one load instruction doesn't do."""
        base = VALUE
        if user or not fits_displacement(offset):
            base = OTHER
            self._emit(SetImmediate(OTHER, offset), Compute(Arithmetic.ADD, OTHER, VALUE))
            offset = 0
        if user:
            self._check_user(OTHER, fault)
        self._emit(Load(dst, base, offset, size, on_fault=fault))

    def _check_user(self, address: int, fault: Label) -> None:
        self._emit(
            SetImmediate(TEMP, self._arch.task_size),
            Branch(Condition.ABOVE_EQ, address, TEMP, fault),
        )

    # Stages 3 to 5, of numbers

    def numbers(self, arg: ProbeArg, at: int, _too_large: Label) -> None:
        """Store the numbers of an argument from BASE + at on; 0 for those that can't be read."""
        stages = arg.stages
        builder = self._builder
        size = stages.store.size
        places = range(at, at + size * (stages.count or 1), size)
        done = builder.label()
        self._load(stages.load)
        if stages.derefs:
            with builder.out_of_line() as fault:
                self._emit(*(StoreImmediate(BASE, place, 0, size) for place in places), Jump(done))
            self._follow(stages.derefs, fault)
        element = self._element if size <= self._word else self._long_element
        for shift, place in enumerate(places):
            element(stages.store, stages.bitfield, shift * size, place)
        builder.place(done)

    def _element(self, insn: FetchInsn, bitfield: FetchInsn | None, shift: int, place: int) -> None:
        builder = self._builder
        size = insn.size
        if insn.op is FetchOp.ST_RAW:
            if bitfield is None:
                self._emit(Store(BASE, place, VALUE, size))
                return
            self._emit(Move(TEMP, VALUE))
        else:
            stored = builder.label()
            with builder.out_of_line() as fault:
                self._emit(SetImmediate(TEMP, 0), Jump(stored))
            self._read(TEMP, insn.value + shift, size, insn.op is FetchOp.ST_UMEM, fault)
            builder.place(stored)
        if bitfield is not None:
            self._shift(bitfield)
        self._emit(Store(BASE, place, TEMP, size))

    def _long_element(self, insn: FetchInsn, bitfield: FetchInsn | None, shift: int, place: int) -> None:
        """One of two words."""
        builder = self._builder
        emit = self._emit
        word = self._word
        if insn.op is FetchOp.ST_RAW:
            emit(Move(TEMP, VALUE), SetImmediate(HIGH, 0))
        else:
            stored = builder.label()
            with builder.out_of_line() as fault:
                emit(SetImmediate(TEMP, 0), SetImmediate(HIGH, 0), Jump(stored))
            self._read_long(insn.value + shift, insn.op is FetchOp.ST_UMEM, fault)
            builder.place(stored)
        if bitfield is not None:
            shift_left(builder, TEMP, HIGH, OTHER, bitfield.lshift)
            shift_right(builder, TEMP, HIGH, OTHER, bitfield.rshift)
        emit(Store(BASE, place, TEMP, word), Store(BASE, place + word, HIGH, word))

    def _read_long(self, offset: int, user: bool, fault: Label) -> None:
        """TEMP and HIGH = the two words at VALUE + offset."""
        word = self._word
        self._emit(SetImmediate(OTHER, offset), Compute(Arithmetic.ADD, OTHER, VALUE))
        if user:
            self._check_user(OTHER, fault)
        self._emit(Load(TEMP, OTHER, 0, word, on_fault=fault), Load(HIGH, OTHER, word, word, on_fault=fault))

    def _shift(self, bitfield: FetchInsn) -> None:
        """Cut at the element's size on the left: so shift left as far as a word's end, and back."""
        unused = 8 * (self._word - bitfield.size)
        self._emit(
            ComputeImmediate(Arithmetic.SHL, TEMP, bitfield.lshift + unused),
            ComputeImmediate(Arithmetic.SHR, TEMP, bitfield.rshift + unused),
        )

    # Stages 3 to 5, of strings

    def strings(self, arg: ProbeArg, at: int, too_large: Label) -> None:
        """Append the strings of an argument, and store their __data_loc from BASE + at on."""
        stages = arg.stages
        builder = self._builder
        for number in range(stages.count or 1):
            stored = builder.label()
            place = at + number * arg.type.size
            with builder.out_of_line() as fault:
                self._location(place, is_fault=True)
                self._emit(Jump(stored))
            if stages.load.op is FetchOp.DATA:
                self._copy_literal(stages.load.data)
            elif stages.count and stages.pointer is None:
                self._emit(Jump(fault))
                builder.place(stored)
                continue
            else:
                self._load(stages.load)
                self._follow(stages.derefs, fault)
                if (pointer := stages.pointer) is not None:
                    offset = pointer.value + number * self._word
                    self._read(VALUE, offset, self._word, pointer.op is FetchOp.UDEREF, fault)
                self._copy(stages.store, fault)
            self._location(place, is_fault=False)
            self._check_size(too_large)
            builder.place(stored)

    def _copy_literal(self, data: bytes) -> None:
        """Store a string that is known now at POSITION; OTHER = behind it."""
        text = data.partition(b"\0")[0] + b"\0"
        for start, size in chunks(len(text), 8):
            value = int.from_bytes(text[start : start + size], "little")
            self._emit(StoreImmediate(POSITION, start, value, size))
        self._emit(Move(OTHER, POSITION), ComputeImmediate(Arithmetic.ADD, OTHER, len(text)))

    def _copy(self, insn: FetchInsn, fault: Label) -> None:
        """Copy from VALUE to POSITION up to the NUL, or as much as a string may be; OTHER = behind it.

        An empty string of user memory goes on at `fault`, as String._string_at() has it.
        """
        builder = self._builder
        emit = self._emit
        again = builder.label()
        done = builder.label()
        stored = builder.label()
        with builder.out_of_line() as is_empty:
            if insn.op is not FetchOp.ST_USTRING:
                emit(SetImmediate(TEMP, self._arch.task_size), Branch(Condition.ABOVE, VALUE, TEMP, stored))
            emit(Jump(fault))
        if insn.value:
            emit(SetImmediate(OTHER, insn.value), Compute(Arithmetic.ADD, VALUE, OTHER))
        if insn.op is FetchOp.ST_USTRING:
            self._check_user(VALUE, fault)
        emit(Move(OTHER, POSITION), Move(LIMIT, POSITION))
        emit(ComputeImmediate(Arithmetic.ADD, LIMIT, MAX_STRING_SIZE - 1))
        builder.place(again)
        emit(
            Load(TEMP, VALUE, 0, 1, on_fault=fault),
            Store(OTHER, 0, TEMP, 1),
            ComputeImmediate(Arithmetic.ADD, VALUE, 1),
            ComputeImmediate(Arithmetic.ADD, OTHER, 1),
            BranchImmediate(Condition.EQ, TEMP, 0, done),
            Branch(Condition.BELOW, OTHER, LIMIT, again),
            # The last byte makes room for the NUL, but must be there.
            Load(TEMP, VALUE, 0, 1, on_fault=fault),
            StoreImmediate(OTHER, 0, 0, 1),
            ComputeImmediate(Arithmetic.ADD, OTHER, 1),
        )
        builder.place(done)
        emit(
            Move(LIMIT, POSITION),
            ComputeImmediate(Arithmetic.ADD, LIMIT, 1),
            Branch(Condition.EQ, OTHER, LIMIT, is_empty),
        )
        builder.place(stored)

    def _location(self, place: int, *, is_fault: bool) -> None:
        """Store the __data_loc of the string from POSITION to OTHER, and move POSITION behind it."""
        self._emit(
            Move(VALUE, POSITION),
            Compute(Arithmetic.SUB, VALUE, BASE),
            Store(BASE, place, VALUE, 2),
        )
        if is_fault:
            self._emit(StoreImmediate(BASE, place + 2, 0, 2))
            return
        self._emit(
            Move(VALUE, OTHER),
            Compute(Arithmetic.SUB, VALUE, POSITION),
            Store(BASE, place + 2, VALUE, 2),
            Move(POSITION, OTHER),
        )

    def _check_size(self, too_large: Label) -> None:
        self._emit(
            Move(VALUE, POSITION),
            Compute(Arithmetic.SUB, VALUE, BASE),
            BranchImmediate(Condition.ABOVE, VALUE, MAX_DATA_SIZE, too_large),
        )


def chunks(size: int, largest: int) -> Iterator[tuple[int, int]]:
    """Start and size of pieces of `largest`, 4, 2 and 1 bytes that make up `size` bytes."""
    start = 0
    for piece in (largest, 4, 2, 1):
        while size - start >= piece:
            yield start, piece
            start += piece


_EMITTERS: dict[type[FetchType], Callable[[FetchEmitter, ProbeArg, int, Label], None]] = {
    Number: FetchEmitter.numbers,
    Hexadecimal: FetchEmitter.numbers,
    SymbolType: FetchEmitter.numbers,
    String: FetchEmitter.strings,
    UserString: FetchEmitter.strings,
}
"""By the kind of type; the host fetches the others."""
