"""Text: patches guest code, and keeps a ledger with the original value of each changed byte."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from typing import Any, Protocol

from emulated_kernel.machine.cpu.model import CpuModel
from emulated_kernel.machine.memory.guest_memory import GuestMemory, GuestPool
from emulated_kernel.machine.memory.sparse_pool import SparsePool
from emulated_kernel.machine.memory_layout import TEXT_SPACE_SIZE
from emulated_kernel.machine.traps.trap import HardwareError, MemoryFault
from emulated_kernel.machine.unicorn_engine import CodeCache
from emulated_kernel.util.abi import PAGE_SIZE, Prot

_FLUSH_FROM = 32
"""Minimum number of pokes in a batch after which all translated code is dropped at once.

After a smaller batch, only the code translated from the changed text is dropped.
"""
_SLOT_ALIGN = 16
_REACH = 1 << 30
"""Maximum distance in bytes from generated code to further code that must reach it by a jump.

The distance is half of the range of a jump, so that there is a margin for the sizes of both pieces of code.
"""
_NO_PAGE = (0, 0, 0)
WORD_SIZE = 16
"""Size in bytes of the aligned pieces of text that share an entry of the ledger.

A call at the start of an aligned function is in one word, also if the call follows an `endbr64`.
"""
_NUMBER = WORD_SIZE.bit_length() - 1
"""`address >> _NUMBER` is the index of the WORD_SIZE-byte word that contains the address."""
_PLACE = WORD_SIZE - 1
"""`address & _PLACE` is the offset of the address in its word."""
_BITS = 8 * WORD_SIZE
_MAX_SHARED = 4096
_DIFFERS = b"\0" + b"\xff" * 255


class TextWatcher(Protocol):
    """Observer of changes of text; stale_fetch.py implements it."""

    def written(self, va: int, before: bytes, after: bytes, /) -> None:
        """Record that the text at `va` has changed in memory from `before` to `after`."""

    def synchronised(self) -> None:
        """Record that all CPUs have executed a serialising instruction."""


def shrink_dict(table: dict[int, Any], before: int) -> bool:
    """Free unused memory of `table` if it has lost at least half of its entries; return True if it was freed.

    `before`: the former number of entries. If it is 0, nothing is freed.

    Python's dicts don't free memory when single entries are removed.
    """
    if not before or len(table) > before // 2:
        return False
    left = dict(table)
    try:
        table.clear()
    finally:
        table.update(left)
    return True


class OriginalBytes(Mapping[int, int]):
    """Address -> original byte, for each address at which the current byte is not the original one.

    The original bytes of each aligned word of WORD_SIZE bytes are in one item of `words`.
    """

    __slots__ = ("changes", "shared", "words")

    def __init__(self) -> None:
        self.changes = 0
        """Number of completed changes of `words`, by which code with cached results notices changes."""
        self.words: dict[int, int] = {}
        """Index of a word -> the original values of its changed bytes, as an integer.

        The lower half of the integer has these values, and 0 for the other bytes. The upper half is a mask,
        which has 0xFF for each changed byte.
        """
        self.shared: dict[int, int] = {}
        """Value in `words` -> the one object that all equal values share to save memory.

        For example, the nops of fentry sites are equal.
        """

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[int]:
        for word, kept in self.words.items():
            yield from (word * WORD_SIZE + at for at in range(WORD_SIZE) if kept >> _BITS + at * 8 & 0xFF)

    def __getitem__(self, address: int) -> int:
        kept = self.words.get(address // WORD_SIZE, 0) >> address % WORD_SIZE * 8
        if not kept >> _BITS & 0xFF:
            raise KeyError(address)
        return kept & 0xFF

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """Yield (address, original bytes) for each run of changed bytes in a word, in ascending order."""
        for word in sorted(self.words):
            kept = self.words[word]
            differs = (kept >> _BITS).to_bytes(WORD_SIZE, "little")
            original = kept.to_bytes(2 * WORD_SIZE, "little")
            at = differs.find(0xFF)
            while at >= 0:
                end = differs.find(0, at) % (WORD_SIZE + 1)
                yield word * WORD_SIZE + at, original[at:end]
                at = differs.find(0xFF, end)

    def write(self, va: int, data: bytes, before: bytes) -> None:
        """Update the ledger for a change of the text at `va` from `before` to `data`."""
        done = 0
        while done < len(data):
            stop = done + WORD_SIZE - (va + done) % WORD_SIZE
            self.write_in_word(va + done, data[done:stop], before[done:stop])
            done = stop

    def write_in_word(self, va: int, data: bytes, before: bytes) -> None:
        """Update the ledger for a change from `before` to `data` at `va`, within one word."""
        words = self.words
        word = va >> _NUMBER
        shift = (va & _PLACE) << 3
        kept = words.get(word, 0)
        original = int.from_bytes(before, "little")
        if kept:
            span = (1 << 8 * len(data)) - 1
            differed = kept >> _BITS + shift & span
            original = original & ~differed | kept >> shift & differed
            kept &= ~((span << _BITS | span) << shift)
        if changed := original ^ int.from_bytes(data, "little"):
            differs = int.from_bytes(changed.to_bytes(len(data), "little").translate(_DIFFERS), "little")
            kept |= (differs << _BITS | original & differs) << shift
        if kept:
            if len(self.shared) > _MAX_SHARED:
                self.shared.clear()
            words[word] = self.shared.setdefault(kept, kept)
        else:
            words.pop(word, None)
        self.changes += 1

    def originals(self, va: int, now: bytes) -> bytes:
        """Return the original bytes of the text at `va`, whose current bytes are `now`."""
        found = bytearray(now)
        end = va + len(now)
        for word in range(va // WORD_SIZE, -(-end // WORD_SIZE)):
            kept = self.words.get(word, 0)
            start = word * WORD_SIZE
            for address in range(max(start, va), min(start + WORD_SIZE, end)) if kept else ():
                if kept >> _BITS + address % WORD_SIZE * 8 & 0xFF:
                    found[address - va] = kept >> address % WORD_SIZE * 8 & 0xFF
        return bytes(found)


class Text:
    """Patches text like the kernel's text_poke(): all CPUs see a change at their next instruction fetch.

    `adopt` declares original text: the image's segments and loaded modules. The ledger only covers original
    text. Insn slots and detour buffers belong to the host, and have no original bytes.
    """

    def __init__(self, engine: CodeCache, cpu: CpuModel, memory: GuestMemory, cpus: int) -> None:
        self._engine = engine
        self._filler = cpu.filler
        self._memory = memory
        self._ram = memory.ram
        self._originals: list[tuple[int, int, bytes | memoryview]] = []
        self._starts: list[int] = []
        self.count = 0
        """Number of pieces of adopted text: those of the kernel, and one for each module."""
        self._slots = GuestPool(
            memory,
            cpu.layout.text_space,
            TEXT_SPACE_SIZE,
            unit=_SLOT_ALIGN,
            prot=Prot.READ | Prot.EXEC,
            fill=cpu.filler,
        )
        self._puns = SparsePool(memory, cpu.layout.pun_space, prot=Prot.READ | Prot.EXEC, fill=cpu.filler)
        self.ledger = OriginalBytes()
        """Address of a patched byte -> original byte. Only Text changes the ledger."""
        self.before_first_change: list[Callable[[], object]] = []
        """Functions to call before a change of text if all text is original. They may run the guest."""
        self.before_change: Callable[[int, int], object] | None = None
        """Function to call before each poke of original text, with address and size. It may run the guest."""
        self.watcher: TextWatcher | None = None
        self._cpus = cpus
        self._written: list[tuple[int, bytes]] | None = None
        self.interrupt_cpus: Callable[[], None] | None = None
        """Function that makes the other CPUs execute a serialising instruction; it may run the guest.

        A guest with several CPUs must set it.
        """

    def adopt(self, va: int, original: bytes | memoryview) -> None:
        """Declare the mapped text at `va` as original; the ledger records its changes from now on.

        `original`: the bytes of this text.

        Raises: MemoryFault (not mapped executable).
        """
        self._physical(va, len(original))
        at = bisect_right(self._starts, va)
        self._originals.insert(at, (va, va + len(original), original))
        self._starts.insert(at, va)
        self.count += 1

    def disown(self, va: int) -> None:
        """Forget the original text that begins at `va`, and its ledger entries, when a module is unloaded.

        Raises: KeyError (no original text begins at `va`).
        """
        at = bisect_right(self._starts, va) - 1
        if at < 0 or self._starts[at] != va:
            raise KeyError(va)
        start, end, _ = self._originals.pop(at)
        self._starts.pop(at)
        self.count -= 1
        for first in [word * WORD_SIZE for word in self.ledger.words]:
            for address in range(max(first, start), min(first + WORD_SIZE, end)):
                original = self.ledger.get(address, 0).to_bytes()
                self.ledger.write(address, original, original)

    def poke(self, va: int, data: bytes) -> None:
        """Write `data` to text at `va`, and drop the code translated from this text.

        All CPUs see the change at once. Raises: MemoryFault (a part isn't mapped executable; nothing was
        written).
        Mirrors: arch/x86/kernel/alternative.c:text_poke (v6.1).
        """
        has_original = self.is_original(va) or self.is_original(va + len(data) - 1)
        if self._is_recorded or has_original or not self.is_generated(va):
            self.poke_batch(((va, data),))
        else:
            # Each probe has a few pieces of generated code.
            self.substitute(va, data)

    def poke_batch(self, pokes: Iterable[tuple[int, bytes]]) -> None:
        """Write text at several addresses, and drop the translated code once. `pokes`: (address, bytes).

        Pokes in the order of their addresses take less time, because each page is then looked up only once.
        Raises: MemoryFault (as `poke`; the pokes before the bad one are done).
        """
        ledger = self.ledger
        words = ledger.words
        write_in_word = ledger.write_in_word
        shared = ledger.shared
        from_bytes = int.from_bytes
        before_change = self.before_change
        ram = self._ram
        start, end, offset = _NO_PAGE
        left = iter(pokes)
        first = [*islice(left, _FLUSH_FROM)]
        pages = set[int]()
        before = len(words)
        try:
            for va, data in chain(first, left):
                size = len(data)
                if not words:
                    start, end, offset = _NO_PAGE
                    self._announce(va)
                if before_change is not None and self.is_original(va):
                    start, end, offset = _NO_PAGE
                    before_change(va, size)
                if not start <= va <= end - size:
                    start, end, offset = self._adopted_page(va)
                    pages.add(va & -PAGE_SIZE)
                    if not start <= va <= end - size:
                        self._write(va, data)
                        continue
                if (va & _PLACE) + size > WORD_SIZE:
                    self._write(va, data)
                    continue
                pa = va + offset
                stop = pa + size
                word = va >> _NUMBER
                if word in words:
                    write_in_word(va, data, ram[pa:stop])
                else:
                    # Do as write_in_word() for a word without an entry: 35,000 calls would take 10 ms.
                    original = from_bytes(ram[pa:stop], "little")
                    if changed := original ^ from_bytes(data, "little"):
                        differs = from_bytes(changed.to_bytes(size, "little").translate(_DIFFERS), "little")
                        kept = (differs << _BITS | original & differs) << ((va & _PLACE) << 3)
                        words[word] = shared.setdefault(kept, kept)
                    ledger.changes += 1
                ram[pa:stop] = data
        finally:
            self._end_batch([(va, len(data)) for va, data in first], pages, before)

    def restore_batch(self, places: Sequence[int], size: int) -> None:
        """Restore the instructions at the addresses `places`, of `size` bytes each, from the ledger.

        Like poke_batch(), drop the translated code once.

        Raises: MemoryFault (as `poke`; the instructions before the bad one are restored).
        """
        if self.before_change is not None or self._is_recorded:
            self.poke_batch((va, self.original(va, size)) for va in places)
            return
        words = self.ledger.words
        ram = self._ram
        start, end, offset = _NO_PAGE
        # For each position in a word: the bits that an instruction there has in the word's entry of the
        # ledger. 0 if the instruction extends to the next word.
        bits = (1 << 8 * size) - 1
        spans = [(bits << _BITS | bits) << 8 * at if at + size <= WORD_SIZE else 0 for at in range(WORD_SIZE)]
        pages = set[int]()
        before = len(words)
        from_bytes = int.from_bytes
        try:
            for va in places:
                if not start <= va <= end - size:
                    start, end, offset = self._adopted_page(va)
                    pages.add(va & -PAGE_SIZE)
                at = va & _PLACE
                span = spans[at]
                if not span or not start <= va <= end - size:
                    self._write(va, self.original(va, size))
                    continue
                word = va >> _NUMBER
                kept = words.get(word, 0)
                mine = kept & span
                if not mine:
                    continue
                if mine == kept:
                    del words[word]
                else:
                    words[word] = kept ^ mine
                mine >>= at << 3
                pa = va + offset
                stop = pa + size
                now = from_bytes(ram[pa:stop], "little")
                ram[pa:stop] = (now ^ (now ^ mine) & mine >> _BITS).to_bytes(size, "little")
        finally:
            self._end_batch([(va, size) for va in places[:_FLUSH_FROM]], pages, before)

    def _end_batch(self, first: list[tuple[int, int]], pages: set[int], before: int) -> None:
        """Drop the translated code after pokes; after many pokes, also free unused memory.

        `first`: (address, size) of the first _FLUSH_FROM pokes. If the list has that many items, there were
        many pokes. `pages`: addresses of the pages of all pokes. `before`: number of words in the ledger
        before the pokes.
        """
        words = self.ledger.words
        self.ledger.changes += 1
        if len(first) >= _FLUSH_FROM:
            self._engine.flush_code()
            if shrink_dict(words, before):
                # shrink_dict() empties the dict for a moment, in which another thread may have read it.
                self.ledger.changes += 1
                self._memory.give_back(pages - {word * WORD_SIZE & -PAGE_SIZE for word in words})
        else:
            for va, size in first:
                self._engine.remove_code(va, size)

    @property
    def _is_recorded(self) -> bool:
        """Whether each change of text is recorded separately, so that changes cannot be made in batches."""
        return self.watcher is not None or self._written is not None

    def _adopted_page(self, va: int) -> tuple[int, int, int]:
        """Return (start, end, offset) of the part of va's page that belongs to the same adopted text as `va`.

        `offset` is the physical minus the virtual address. Return _NO_PAGE, an empty range, if `va` is not in
        adopted text, if the page is not mapped executable, or if changes are recorded separately.
        """
        if self._is_recorded or not self.is_original(va):
            return _NO_PAGE
        page = va & -PAGE_SIZE
        pa = self._memory.locate_text(page, PAGE_SIZE)
        if pa is None:
            return _NO_PAGE
        start, end, _ = self._originals[bisect_right(self._starts, va) - 1]
        return max(page, start), min(page + PAGE_SIZE, end), pa - page

    def substitute(self, va: int, data: bytes) -> None:
        """Write `data` to text for temporary use; neither the ledger nor the watcher records the change.

        Raises: MemoryFault (a part isn't mapped executable).
        """
        self._store(data, self._physical(va, len(data)))
        self._engine.remove_code(va, len(data))

    def replace(self, va: int, data: bytes) -> None:
        """Change original text permanently: `data` becomes the original text at `va`.

        Raises: MemoryFault (a part isn't mapped executable).
        """
        if self._written is not None:
            self._written.append((va, data))
        self.substitute(va, data)

    @contextmanager
    def recorded(self) -> Iterator[list[tuple[int, bytes]]]:
        """Record the pokes in the `with` block; yield the list of records (address, new bytes), oldest first.

        This is for a caller that then restores an older copy of the guest's memory. The caller must then pass
        the records to substitute(), so that ledger and text agree.
        """
        written: list[tuple[int, bytes]] = []
        self._written = written
        try:
            yield written
        finally:
            self._written = None

    def sync(self) -> None:
        """Make all CPUs execute a serialising instruction.

        The emulator's CPUs prefetch nothing, but a watcher may emulate prefetching; it is called too.
        Raises: HardwareError (there are several CPUs, but `interrupt_cpus` isn't set).
        Mirrors: arch/x86/kernel/alternative.c:text_poke_sync (v6.1).
        """
        if self.interrupt_cpus is not None:
            self.interrupt_cpus()
        elif self._cpus > 1:
            raise HardwareError("text patching: the other CPUs can't be interrupted yet")
        if self.watcher is not None:
            self.watcher.synchronised()

    @property
    def is_fetched_meanwhile(self) -> bool:
        """Whether another CPU or the watcher can see the text between two pokes."""
        return self._cpus > 1 or self.interrupt_cpus is not None or self.watcher is not None

    def current(self, va: int, size: int) -> bytes:
        """Return the current bytes of text, including patches. Raises: MemoryFault (not mapped)."""
        return self._memory.read(va, size)

    def original(self, va: int, size: int) -> bytes:
        """Return the original bytes of text, without patches. Raises: MemoryFault (not mapped)."""
        data = self._memory.read(va, size)
        return self.ledger.originals(va, data) if self.ledger.words else data

    def is_foreign(self, va: int, size: int, code: bytes | None = None) -> bool:
        """Return True if adopted text has changes that Text did not make, such as the guest's own kprobes.

        `code`: result of original() for the same bytes; if None, original() is called. Return False if the
        bytes are not in adopted text.
        """
        at = bisect_right(self._starts, va) - 1
        if at < 0 or va + size > self._originals[at][1]:
            return False
        start, _, original = self._originals[at]
        return (code or self.original(va, size)) != original[va - start : va - start + size]

    def alloc_text(self, size: int, starts: range | None = None) -> int:
        """Allocate `size` bytes of executable memory, filled with breakpoints, and return the address.

        If `starts` is None, the memory is 16-byte aligned. Otherwise it begins at one of the addresses
        `starts`. Use `poke` to write code to it.
        Raises: HardwareError (no memory for text is left).
        """
        return self._slots.alloc(size) if starts is None else self._puns.alloc(size, starts)

    def around(self, va: int) -> range | None:
        """Return the `starts` with which alloc_text() allocates memory for a jump to generated code at `va`.

        These are the addresses from which a jump reaches `va`. Return None if `va` is not in memory that was
        allocated with `starts`: then any memory that alloc_text() allocates without `starts` is near enough.
        """
        return range(va - _REACH, va + _REACH) if va in self._puns else None

    @property
    def generated(self) -> tuple[range, ...]:
        """Addresses of the pages for generated code: slots, detours, trampolines and stubs."""
        return (self._slots.mapped, *self._puns.mapped)

    def is_generated(self, va: int) -> bool:
        """Return True if the address `va` is in a page for generated code."""
        return va in self._slots or va in self._puns

    def free_text(self, va: int) -> None:
        """Free memory from alloc_text(). Fill the memory with breakpoints, so that late jumps to it trap.

        Raises: HardwareError (not allocated).
        """
        if va in self._puns:
            self.poke(va, self._filler * (self._puns.size_of(va) // len(self._filler)))
            self._puns.free(va)
            return
        size = self._slots.free(va)
        self.poke(va, self._filler * (size // len(self._filler)))

    def _physical(self, va: int, size: int) -> Sequence[tuple[int, int]]:
        """Return (physical address, size) of each physically contiguous part of the text at `va`.

        Raises: MemoryFault (a part isn't executable).
        """
        pa = self._memory.locate_text(va, size)
        if pa is not None:
            return ((pa, size),)
        for page in (va, *range(va - va % PAGE_SIZE + PAGE_SIZE, va + size, PAGE_SIZE)):
            if self._memory.locate_text(page, 1) is None:
                raise MemoryFault(page, "not text")
        return tuple(self._memory.pieces(va, size))

    def _write(self, va: int, data: bytes) -> None:
        pieces = self._physical(va, len(data))
        before = b""
        for pa, size in pieces:
            before += self._ram[pa : pa + size]
        self._note(va, data, before)
        if self._written is not None:
            self._written.append((va, data))
        self._store(data, pieces)
        if self.watcher is not None:
            self.watcher.written(va, before, data)

    def _store(self, data: bytes, pieces: Sequence[tuple[int, int]]) -> None:
        done = 0
        for pa, size in pieces:
            self._ram[pa : pa + size] = data[done : done + size]
            done += size

    def is_original(self, va: int) -> bool:
        """Return True if the address `va` is in adopted text."""
        at = bisect_right(self._starts, va) - 1
        return at >= 0 and va < self._originals[at][1]

    def _announce(self, va: int) -> None:
        """Call all functions in `before_first_change` if `va` is in original text.

        The ledger of changes must be empty.
        """
        if self.is_original(va):
            for callback in self.before_first_change:
                callback()

    def _note(self, va: int, data: bytes, before: bytes) -> None:
        """Update the ledger for a poke; `before` is the text that `data` replaces."""
        end = va + len(data)
        at = bisect_right(self._starts, va) - 1
        if at >= 0 and end <= self._originals[at][1]:
            # Don't read the original: it may be in a mapped file, whose pages would then take memory.
            self.ledger.write(va, data, before)
        elif len(data) > 1 and any(start < end and va < stop for start, stop, _ in self._originals):
            for i in range(len(data)):
                self._note(va + i, data[i : i + 1], before[i : i + 1])
