"""Guest code that fetches the arguments of events: FetchEmitter emits the code for each type of argument."""

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
    Move,
    SetImmediate,
    Store,
    StoreImmediate,
    UserAccessBegin,
    UserAccessEnd,
)
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.trace.compiled.guest_addresses import GuestAddresses
from emulated_kernel.trace.fetch.fetch_insn import FetchInsn, FetchOp, FetchProgram
from emulated_kernel.trace.fetch.fetch_types import (
    MAX_STRING_SIZE,
    Character,
    FetchType,
    Hexadecimal,
    Number,
    String,
    SymbolType,
    UserString,
)
from emulated_kernel.trace.fetch.probe_arg import ProbeArg
from emulated_kernel.trace.ring.buffer_page import MAX_DATA_SIZE

# Virtual registers. TEMP, OTHER and HIGH hold no value between arguments. Code for arguments of type Number
# does not change POSITION and LIMIT.
BASE = 0
"""Number of the virtual register with the address of the entry, in scratch memory or the ring buffer."""
VALUE = 1
"""Number of the virtual register with the value that is being fetched."""
TEMP = 2
"""Number of the first virtual register for temporary values."""
OTHER = 3
"""Number of the second virtual register for temporary values."""
POSITION = 4
"""Number of the virtual register with the address at which the next string of the entry is stored."""
LIMIT = 5
"""Number of the virtual register with the maximum address that the copy of a string may reach."""
HIGH = 6
"""Number of the virtual register with the upper half of a u64, if a word has 4 bytes."""
MAX_ELEMENTS = 256
"""Maximum number of values that guest code fetches for an event; each element of an array is a value.

Code for more values would be too large.
"""


def fits_displacement(value: int) -> bool:
    """Return True if `value` fits into a signed displacement of 32 bits."""
    return -(1 << 31) <= value < 1 << 31


def can_fetch(args: Sequence[ProbeArg], registers: frozenset[str]) -> bool:
    """Return True if guest code can fetch the arguments.

    `registers`: names of the registers that guest code can read.

    Return False if an argument loads another register, has the type symstr, or accesses a per-CPU variable.
    Also return False if an argument is a value that was stored at a function's entry, or if there are more
    than MAX_ELEMENTS values.
    """
    if sum(arg.count or 1 for arg in args) > MAX_ELEMENTS:
        return False
    return all(
        type(arg.type) in _EMITTERS
        and arg.stages.load.op is not FetchOp.EDATA
        and all(insn.op is not FetchOp.CPU_PTR for insn in arg.stages.derefs)
        and (arg.stages.load.op is not FetchOp.REG or arg.stages.load.name in registers)
        for arg in args
    )


class FetchEmitter:
    """Emits code that fetches one event's arguments at one probed address."""

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
        """Number of bytes that the hook, and not the probed code, has pushed onto the stack."""

    def store(self, args: Sequence[ProbeArg], start: int, too_large: Label) -> None:
        """Emit code that stores all arguments in the entry, from the address BASE + start on.

        The code stores strings at POSITION, which it advances. If the entry at BASE gets larger than a ring
        buffer can hold, the code jumps to `too_large`.
        """
        for arg in args:
            _EMITTERS[type(arg.type)](self, arg, start + arg.offset, too_large)

    def store_return_address(self, at: int) -> None:
        """Emit code that stores, at BASE + at, the address that a returning function returns to."""
        self._return_address()
        self._emit(Store(BASE, at, VALUE, self._word))

    def _return_address(self) -> None:
        arch = self._arch
        self._emit(GetRegister(VALUE, arch.registers.sp), Load(VALUE, VALUE, arch.returned_at, self._word))

    # Stages 1 and 2, which compute VALUE

    def _load(self, insn: FetchInsn) -> None:
        match insn.op:
            case FetchOp.REG | FetchOp.STACKP | FetchOp.RETVAL:
                self._register(insn.name)
            case FetchOp.STACK:
                self._stack_word(insn.value)
            case FetchOp.CURRENT:
                self._emit(self._places.cpu.load_task(VALUE))
            case FetchOp.COMM:
                self._emit(self._places.cpu.load_task(VALUE))
                self._emit(ComputeImmediate(Arithmetic.ADD, VALUE, self._places.comm))
            case _:
                self._emit(SetImmediate(VALUE, insn.value))

    def _register(self, name: str) -> None:
        if name == "ip" and self._is_return:
            self._return_address()
        elif name == "ip":
            # Linux: the handler sees the ip of a breakpoint, however the probe was hit.
            self._emit(SetImmediate(VALUE, self._address + self._arch.handler_ip_offset))
        else:
            self._emit(GetRegister(VALUE, name))
            if name == self._arch.registers.sp and self._below:
                self._emit(ComputeImmediate(Arithmetic.ADD, VALUE, self._below))

    def _stack_word(self, number: int) -> None:
        """Emit code that sets VALUE to the kernel stack's word `number`, or to 0 outside of the stack.

        Word 0 is the one at the stack pointer.
        """
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
        """Emit code that loads `size` bytes from VALUE + `offset` into `dst`, or jumps to `fault` at a fault.

        `user`: an address outside of user space is a fault; if `user` is not set, any address is allowed. The
        code may overwrite OTHER, and TEMP if `user` is set.
        """
        base = VALUE
        if offset and (user or not self._arch.reads_user or not fits_displacement(offset)):
            base = OTHER
            self._emit(SetImmediate(OTHER, offset), Compute(Arithmetic.ADD, OTHER, VALUE))
            offset = 0
        if user:
            self._check_user(base, fault)
        self._access(
            base, user, fault, lambda fault: self._emit(Load(dst, base, offset, size, on_fault=fault))
        )

    def _access(self, address: int, user: bool, fault: Label, load: Callable[[Label], None]) -> None:
        """Emit loads at the address in the register `address`.

        `user`: the address is in user memory; if `user` is not set, it may be anywhere. `load` emits the
        loads; its argument is the label to which they jump at a fault. `fault`: label at which the code
        continues after a fault. If the architecture blocks the kernel's access to user memory, the code
        enables access during the loads. If `user` is not set, it does so only for addresses in the lower half
        of the address space.
        """
        if self._arch.reads_user:
            load(fault)
        elif user:
            self._access_user(fault, load)
        else:
            builder = self._builder
            done = builder.label()
            with builder.out_of_line() as in_user:
                self._access_user(fault, load)
                self._emit(Jump(done))
            self._emit(BranchImmediate(Condition.GREATER_EQ, address, 0, in_user))
            load(fault)
            builder.place(done)

    def _access_user(self, fault: Label, load: Callable[[Label], None]) -> None:
        with self._builder.out_of_line() as on_fault:
            self._emit(UserAccessEnd(), Jump(fault))
        self._emit(UserAccessBegin())
        load(on_fault)
        self._emit(UserAccessEnd())

    def _check_user(self, address: int, fault: Label) -> None:
        self._emit(
            SetImmediate(TEMP, self._arch.task_size),
            Branch(Condition.ABOVE_EQ, address, TEMP, fault),
        )

    # Stages 3 to 5 for numbers

    def numbers(self, arg: ProbeArg, at: int, _too_large: Label) -> None:
        """Emit code that stores an argument's numbers from BASE + at on; 0 stands for unreadable numbers."""
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
        """Emit code that stores an element of two words at BASE + `place`.

        `insn`: the store operation. `bitfield`: operation with the shifts that extract a bit field; None for
        other elements. `shift`: number of bytes to add to the offset in `insn`, for an element after the
        first.
        """
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
        """Emit code that loads the two words at VALUE + `offset`: the lower into TEMP, the upper into HIGH.

        The code jumps to `fault` if the words cannot be read. `user`: an address outside of user space is a
        fault; if `user` is not set, any address is allowed. The code overwrites OTHER.
        """
        word = self._word
        self._emit(SetImmediate(OTHER, offset), Compute(Arithmetic.ADD, OTHER, VALUE))
        if user:
            self._check_user(OTHER, fault)
        self._emit(Load(TEMP, OTHER, 0, word, on_fault=fault), Load(HIGH, OTHER, word, word, on_fault=fault))

    def _shift(self, bitfield: FetchInsn) -> None:
        """Emit the shifts that extract a bitfield from the element in TEMP.

        Both shift counts include the number of bits that a short element leaves unused in the word.
        """
        unused = 8 * (self._word - bitfield.size)
        self._emit(
            ComputeImmediate(Arithmetic.SHL, TEMP, bitfield.lshift + unused),
            ComputeImmediate(Arithmetic.SHR, TEMP, bitfield.rshift + unused),
        )

    # Stages 3 to 5 for strings

    def strings(self, arg: ProbeArg, at: int, too_large: Label) -> None:
        """Emit code that appends an argument's strings to the entry, with their __data_loc from BASE + at on.

        If the entry gets larger than a ring buffer can hold, the code jumps to `too_large`.
        """
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
        """Emit code that stores the string `data` at POSITION, and sets OTHER to the address after it."""
        text = data.partition(b"\0")[0] + b"\0"
        for start, size in chunks(len(text), 8):
            value = int.from_bytes(text[start : start + size], "little")
            self._emit(StoreImmediate(POSITION, start, value, size))
        self._emit(Move(OTHER, POSITION), ComputeImmediate(Arithmetic.ADD, OTHER, len(text)))

    def _copy(self, insn: FetchInsn, fault: Label) -> None:
        """Emit code that copies a string to POSITION, up to its NUL or MAX_STRING_SIZE bytes.

        `insn`: the store operation; its value is the string's offset from VALUE. The code sets OTHER to the
        address after the copy. If the string cannot be read, the code jumps to `fault`. It also does so if a
        string in user memory is empty, because Linux does not tell this from a fault.
        """
        builder = self._builder
        emit = self._emit
        stored = builder.label()
        with builder.out_of_line() as is_empty:
            if insn.op is not FetchOp.ST_USTRING:
                emit(SetImmediate(TEMP, self._arch.task_size), Branch(Condition.ABOVE, VALUE, TEMP, stored))
            emit(Jump(fault))
        if insn.value:
            emit(SetImmediate(OTHER, insn.value), Compute(Arithmetic.ADD, VALUE, OTHER))
        is_user = insn.op is FetchOp.ST_USTRING
        if is_user:
            self._check_user(VALUE, fault)
        emit(Move(OTHER, POSITION), Move(LIMIT, POSITION))
        emit(ComputeImmediate(Arithmetic.ADD, LIMIT, MAX_STRING_SIZE - 1))
        self._access(VALUE, is_user, fault, self._copy_bytes)
        emit(
            Move(LIMIT, POSITION),
            ComputeImmediate(Arithmetic.ADD, LIMIT, 1),
            Branch(Condition.EQ, OTHER, LIMIT, is_empty),
        )
        builder.place(stored)

    def _copy_bytes(self, fault: Label) -> None:
        """Emit code that copies bytes from VALUE to OTHER, up to a NUL or to LIMIT, and advances OTHER.

        If OTHER reaches LIMIT, the code appends a NUL. The code overwrites VALUE and TEMP. If a byte cannot
        be read, the code jumps to `fault`.
        """
        builder = self._builder
        again = builder.label()
        done = builder.label()
        builder.place(again)
        self._emit(
            Load(TEMP, VALUE, 0, 1, on_fault=fault),
            Store(OTHER, 0, TEMP, 1),
            ComputeImmediate(Arithmetic.ADD, VALUE, 1),
            ComputeImmediate(Arithmetic.ADD, OTHER, 1),
            BranchImmediate(Condition.EQ, TEMP, 0, done),
            Branch(Condition.BELOW, OTHER, LIMIT, again),
            # The NUL replaces the last byte of the string; this load faults if that byte is unreadable.
            Load(TEMP, VALUE, 0, 1, on_fault=fault),
            StoreImmediate(OTHER, 0, 0, 1),
            ComputeImmediate(Arithmetic.ADD, OTHER, 1),
        )
        builder.place(done)

    def _location(self, place: int, *, is_fault: bool) -> None:
        """Emit code that stores a string's __data_loc at BASE + `place`, and advances POSITION.

        The string reaches from POSITION to OTHER. If `is_fault` is set, there is no string: the length in
        __data_loc is 0, and POSITION does not change.
        """
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
    """Divide `size` bytes into pieces of `largest`, 4, 2 and 1 bytes; yield start and size of each."""
    start = 0
    for piece in (largest, 4, 2, 1):
        while size - start >= piece:
            yield start, piece
            start += piece


_EMITTERS: dict[type[FetchType], Callable[[FetchEmitter, ProbeArg, int, Label], None]] = {
    Number: FetchEmitter.numbers,
    Hexadecimal: FetchEmitter.numbers,
    Character: FetchEmitter.numbers,
    SymbolType: FetchEmitter.numbers,
    String: FetchEmitter.strings,
    UserString: FetchEmitter.strings,
}
"""Class of fetch type -> method that emits the code for an argument. The host fetches all other types."""
