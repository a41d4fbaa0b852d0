"""Guest code that handlers call to move the tail of a ring to the next sub-buffer.

The handler passes a *request for room*: REQUEST_SIZE bytes of the per-CPU area, with the time and length of
the event that needs room. The code also keeps intermediate values in it.

If the tail page has no room for an event, the code stores the same words in the same order as
RingWriter.make_room(). If the code cannot move the tail, it changes nothing that readers see, and the handler
calls the host.
"""

from __future__ import annotations

from typing import Final

from emulated_kernel.arch.program.ir import (
    Arithmetic,
    Branch,
    BranchImmediate,
    Compute,
    ComputeImmediate,
    Condition,
    IncreasePerCpu,
    Jump,
    Label,
    Load,
    LoadPerCpu,
    Move,
    SetImmediate,
    Store,
    StoreImmediate,
    StorePerCpu,
)
from emulated_kernel.arch.program.ir_builder import ProgramBuilder
from emulated_kernel.kprobes.codegen.compiler import Compiler
from emulated_kernel.trace.ring.buffer_page import MAX_ORDER, PADDING, PAGE_HEADER_SIZE, TIME_EVENT_SIZE
from emulated_kernel.trace.ring.ring_layout import SLOTS, RingFlag, offset_of

TIME: Final = 0
"""Offset, in a request for room, of the field with the time stamp of the event that needs room."""
LENGTH: Final = 8
"""Offset, in a request for room, of the field with the event's size in bytes.

The code of this module sets the field to 0 if the event has room after the call.
"""
CONTROL: Final = 16
"""Offset, in a request for room, of the field with the address of the ring's control block."""
NEXT_PAGE: Final = 24
"""Offset, in a request for room, of the field with the address of this module's compiled code.

The address is 0 before the code is compiled. In the word after the address, CallPerCpu saves a register.
"""
_SLOT = 40
_TARGET = 48
_HEAD = 56
_OVERRUN = 64
_ENTRIES = 72
_ENTRIES_BYTES = 80
REQUEST_SIZE: Final = 88
"""Size of a request for room in bytes."""

_CELL = 8
"""Size in bytes of each word of a ring's control block, and of each field of a request for room."""
_COUNTERS = (("overrun", _OVERRUN), ("entries", _ENTRIES), ("entries_bytes", _ENTRIES_BYTES))
"""Counters that the code increases: (name in the ring's control block, offset in the request for room).

The code keeps a counter's new value at this offset, until it stores all changes in the control block.
"""
_TABLE = SLOTS * _CELL
"""Offset in bytes, from the address of the buffer's memory, of the table of ring slots."""
_PAGE_BITS = 12
"""Number of bits of an offset in a sub-buffer of order 0."""

# Virtual registers.
_RING = 0
"""Number of the virtual register with the address of the ring's control block."""
_OLD = 1
"""Number of the virtual register with the address of the tail page."""
_CAPACITY = 2
"""Number of the virtual register with the number of bytes of data that a page can hold."""
_PLACE = 3
"""Number of the virtual register with the number of a ring slot, with an address, or with a size."""
_COUNTS = 4
"""Number of the virtual register with the address of the table of pages' event counts, less _TABLE."""
_PAGE = 5
"""Number of the virtual register with the number of a page, or with a size."""
_TEMP = 6
"""Number of the virtual register for temporary values."""


def compile_next_page(compiler: Compiler, word_size: int, request: int) -> int | None:
    """Compile the code that moves a ring's tail to the next sub-buffer, and return the code's address.

    Return None if compilation is disabled, if the instruction decoder cannot be loaded, or if there is no
    memory for the code. `request`: per-CPU offset of the memory in which a handler stores its request for
    room.
    """
    if not compiler.may_compile:
        return None
    builder = ProgramBuilder()
    NextPageEmitter(builder, word_size, request).emit()
    code = compiler.routine(builder)
    return None if code is None else code.entry


class NextPageEmitter:
    """Emits the code that moves a ring's tail to the next sub-buffer.

    There is no branch between the first and the last store that readers see. The guest can stop only between
    two blocks of translated code, so readers never see a part of the stores.
    """

    def __init__(self, builder: ProgramBuilder, word_size: int, request: int) -> None:
        """Prepare to emit the code to `builder`.

        `word_size`: size of the guest's registers in bytes. `request`: per-CPU offset of the memory in which
        a handler stores its request for room.
        """
        self._word = word_size
        self._builder = builder
        self._emit = builder.emit
        self._request = request

    def emit(self) -> None:
        """Emit the code. If only the host can move the tail, the code changes nothing that readers see."""
        refused = self._builder.label()
        self._emit(LoadPerCpu(_RING, self._request + CONTROL, self._word))
        self._leave_old_page(refused)
        self._find_target(refused)
        self._find_changes(refused)
        self._change()
        self._builder.place(refused)

    def _load(self, dst: int, word: str) -> Load:
        return Load(dst, _RING, offset_of(word), self._word)

    def _store(self, word: str, src: int) -> None:
        self._store_cell(_RING, offset_of(word), src)

    def _store_cell(self, base: int, offset: int, src: int) -> None:
        """Emit code that stores the register `src` as an 8-byte word at `base` + `offset`.

        If the guest's registers have 4 bytes, the upper 4 bytes of the word become 0.
        """
        self._emit(Store(base, offset, src, self._word))
        if self._word < _CELL:
            self._emit(StoreImmediate(base, offset + self._word, 0, self._word))

    def _keep(self, cell: int, src: int) -> StorePerCpu:
        return StorePerCpu(self._request + cell, src, self._word)

    def _kept(self, dst: int, cell: int, at: int = 0) -> LoadPerCpu:
        return LoadPerCpu(dst, self._request + cell + at, self._word)

    def _store_kept(self, base: int, offset: int, cell: int) -> None:
        """Emit code that copies the 8 bytes at offset `cell` of the request for room to `base` + `offset`.

        The code overwrites _TEMP.
        """
        for at in range(0, _CELL, self._word):
            self._emit(self._kept(_TEMP, cell, at), Store(base, offset + at, _TEMP, self._word))

    def _keep_word(self, cell: int, word: str) -> None:
        """Emit code that copies the word `word` of the ring's control block into the request for room.

        `cell`: offset of the copy in the request for room.

        The code overwrites _TEMP.
        """
        for at in range(0, _CELL, self._word):
            self._emit(Load(_TEMP, _RING, offset_of(word) + at, self._word), self._keep(cell + at, _TEMP))

    def _increase(self, cell: int, src: int) -> IncreasePerCpu:
        return IncreasePerCpu(self._request + cell, src)

    def _to_page(self, register: int, spare: int) -> None:
        """Emit code that replaces the number of a page in `register` by the page's address.

        The code sets _TEMP to the binary logarithm of the page's size, and overwrites `spare`.
        """
        self._emit(
            self._load(_TEMP, "order"),
            ComputeImmediate(Arithmetic.ADD, _TEMP, _PAGE_BITS),
            Compute(Arithmetic.SHL, register, _TEMP),
            self._load(spare, "first_page"),
            Compute(Arithmetic.ADD, register, spare),
        )

    def _to_entry(self, register: int, table: int) -> None:
        """Emit code that replaces an index in `register` by the address of the table's item, less _TABLE.

        `table`: register with the address of the table, less _TABLE. The later load or store of the item adds
        _TABLE.
        """
        self._emit(
            ComputeImmediate(Arithmetic.SHL, register, 3),
            Compute(Arithmetic.ADD, register, table),
        )

    def _wrap(self, slot: int, count: int) -> None:
        """Emit code that replaces the ring slot in the register `slot` by the next ring slot.

        `count`: register with the number of ring slots. Slot 0 follows the last slot.
        """
        below = self._builder.label()
        self._emit(
            ComputeImmediate(Arithmetic.ADD, slot, 1),
            Branch(Condition.BELOW, slot, count, below),
            SetImmediate(slot, 0),
        )
        self._builder.place(below)

    def _leave_old_page(self, refused: Label) -> None:
        """Emit code that sets _OLD and _CAPACITY, and fills the rest of the old page with padding.

        The code jumps to `refused` if the old page has room for the event, which then needs a time extend.
        Hazard: guest code may have damaged the words of the control block. If a word that the code uses is
        invalid, the code jumps to `refused`.
        """
        emit = self._emit
        emit(
            self._load(_PAGE, "nr_pages"),
            self._load(_OLD, "tail_page"),
            Branch(Condition.ABOVE, _OLD, _PAGE, refused),
            self._load(_PAGE, "order"),
            BranchImmediate(Condition.ABOVE, _PAGE, MAX_ORDER, refused),
        )
        self._to_page(_OLD, _PLACE)
        emit(
            SetImmediate(_CAPACITY, 1),
            Compute(Arithmetic.SHL, _CAPACITY, _TEMP),
            ComputeImmediate(Arithmetic.ADD, _CAPACITY, -PAGE_HEADER_SIZE),
            self._load(_PLACE, "write_ptr"),
            Move(_PAGE, _OLD),
            Compute(Arithmetic.ADD, _PAGE, _CAPACITY),
            ComputeImmediate(Arithmetic.ADD, _PAGE, PAGE_HEADER_SIZE),
            Compute(Arithmetic.SUB, _PAGE, _PLACE),
            # _PAGE is the room. It is out of range if write_ptr is 0, because only the host may write then.
            Branch(Condition.ABOVE, _PAGE, _CAPACITY, refused),
            BranchImmediate(Condition.ANY_BIT, _PAGE, 3, refused),
            self._kept(_TEMP, LENGTH),
            # If there is room, the event needs a time extend.
            Branch(Condition.ABOVE_EQ, _PAGE, _TEMP, refused),
        )
        full = self._builder.label()
        emit(
            BranchImmediate(Condition.EQ, _PAGE, 0, full),
            BranchImmediate(Condition.BELOW, _PAGE, TIME_EVENT_SIZE, refused),
            StoreImmediate(_PLACE, 0, PADDING | 1 << 5, 4),
            ComputeImmediate(Arithmetic.ADD, _PAGE, -4),
            Store(_PLACE, 4, _PAGE, 4),
        )
        self._builder.place(full)

    def _find_target(self, refused: Label) -> None:
        """Emit code that finds the next page, and keeps its ring slot and number in the request for room.

        The code also sets the virtual register _COUNTS. It jumps to `refused` if there is no page with this
        number, because the guest has damaged the table of ring slots.
        """
        emit = self._emit
        emit(self._load(_TEMP, "nr_pages"), self._load(_PLACE, "tail_slot"))
        self._wrap(_PLACE, _TEMP)
        emit(self._load(_COUNTS, "base"), Move(_PAGE, _PLACE))
        self._to_entry(_PAGE, _COUNTS)
        emit(
            Load(_PAGE, _PAGE, _TABLE, self._word),
            Branch(Condition.ABOVE, _PAGE, _TEMP, refused),
            self._keep(_SLOT, _PLACE),
            self._keep(_TARGET, _PAGE),
            ComputeImmediate(Arithmetic.SHL, _TEMP, 3),
            Compute(Arithmetic.ADD, _COUNTS, _TEMP),
        )

    def _find_changes(self, refused: Label) -> None:
        """Emit code that stores new values of the head slot and of _COUNTERS in the request for room.

        If the next page is the oldest unread one, its events are lost, and the page after it becomes the
        head. The code jumps to `refused` if the ring must not overwrite events, or if the data size in the
        header of the lost page is invalid.
        """
        emit = self._emit
        for word, cell in _COUNTERS:
            self._keep_word(cell, word)
        free = self._builder.label()
        ready = self._builder.label()
        emit(
            self._load(_TEMP, "tail_entries"),
            self._increase(_ENTRIES, _TEMP),
            self._load(_TEMP, "head_slot"),
            self._keep(_HEAD, _TEMP),
            Branch(Condition.NE, _PLACE, _TEMP, free),
            # If the tail is the reader page, the ring is empty, so its head page can be written.
            self._load(_TEMP, "tail_page"),
            self._load(_PAGE, "reader_page"),
            Branch(Condition.EQ, _TEMP, _PAGE, free),
            self._load(_TEMP, "flags"),
            BranchImmediate(Condition.NO_BIT, _TEMP, RingFlag.OVERWRITE, refused),
            self._load(_TEMP, "nr_pages"),
        )
        self._wrap(_PLACE, _TEMP)
        emit(self._keep(_HEAD, _PLACE), self._kept(_PAGE, _TARGET))
        self._to_page(_PAGE, _PLACE)
        emit(
            Load(_TEMP, _PAGE, _CELL, self._word),
            Branch(Condition.ABOVE, _TEMP, _CAPACITY, refused),
            Move(_PLACE, _CAPACITY),
            Compute(Arithmetic.SUB, _PLACE, _TEMP),
            self._increase(_ENTRIES_BYTES, _PLACE),
            self._kept(_PAGE, _TARGET),
        )
        self._to_entry(_PAGE, _COUNTS)
        emit(Load(_TEMP, _PAGE, _TABLE, self._word), self._increase(_OVERRUN, _TEMP), Jump(ready))
        self._builder.place(free)
        emit(self._increase(_ENTRIES_BYTES, _CAPACITY))
        self._builder.place(ready)

    def _set(self, word: str, value: int) -> None:
        self._emit(StoreImmediate(_RING, offset_of(word), value, _CELL))

    def _change(self) -> None:
        """Emit code that makes the next page the tail page; its time stamp is that in the request for room.

        Mirrors: kernel/trace/ring_buffer.c:rb_move_tail (v6.1).
        """
        emit = self._emit
        self._set("changing", 1)
        self._store_cell(_OLD, _CELL, _CAPACITY)
        emit(self._load(_PAGE, "tail_page"))
        self._to_entry(_PAGE, _COUNTS)
        emit(self._load(_TEMP, "tail_entries"))
        self._store_cell(_PAGE, _TABLE, _TEMP)
        emit(self._kept(_TEMP, _HEAD))
        self._store("head_slot", _TEMP)
        for word, cell in _COUNTERS:
            self._store_kept(_RING, offset_of(word), cell)
        self._set("tail_entries", 0)
        emit(self._kept(_PAGE, _TARGET), Move(_OLD, _PAGE))
        self._to_page(_OLD, _PLACE)
        self._store_kept(_OLD, 0, TIME)
        emit(StoreImmediate(_OLD, _CELL, 0, _CELL), Move(_PLACE, _PAGE))
        self._to_entry(_PLACE, _COUNTS)
        emit(StoreImmediate(_PLACE, _TABLE, 0, _CELL), self._kept(_PLACE, _SLOT))
        self._store("tail_slot", _PLACE)
        self._store("tail_page", _PAGE)
        emit(ComputeImmediate(Arithmetic.ADD, _OLD, PAGE_HEADER_SIZE))
        self._store("parked_ptr", _OLD)
        self._store_kept(_RING, offset_of("write_stamp"), TIME)
        self._store("write_ptr", _OLD)
        self._set("changing", 0)
        emit(SetImmediate(_TEMP, 0), self._keep(LENGTH, _TEMP))
