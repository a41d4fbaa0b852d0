"""Damages single words of a guest's memory, and limits how much readers of this memory may read."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple

from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.machine.traps.trap import MemoryFault
from emulated_kernel.util.errors import KernelError

MAX_READS = 300_000
"""Maximum number of reads in one call of a reader. This number of reads takes about half a second."""
MAX_BYTES = 64 << 20
"""Maximum number of bytes that one call of a reader may read."""
NOT_CANONICAL = 0x1234_5678_9ABC_DEF0
_WORD = 8
_WHOLE = 16
"""Maximum number of words of one read that are damaged. In a longer read, this many random words are."""
Readers = Mapping[str, Callable[[], object]]
"""Name -> a function that reads the guest's memory."""


class Runaway(BaseException):
    """Exception for a reader that reads too much. No handler of the code under test may catch it."""


class Field(NamedTuple):
    """A word, or the part of one, in the guest's memory that some reader has read."""

    va: int
    pa: int
    size: int


class Watched:
    """A guest's memory that counts its reads and can note their addresses."""

    def __init__(self, memory: GuestMemory) -> None:
        self.memory = memory
        self._read = memory.read
        self._noted: dict[tuple[int, int], None] | None = None
        self._reads = 0
        self._bytes = 0

    def note(self, va: int, size: int) -> None:
        """Count a read of `size` bytes at `va`. Raises: Runaway (too many reads or bytes)."""
        self._reads += 1
        self._bytes += size
        if self._reads > MAX_READS or self._bytes > MAX_BYTES:
            raise Runaway(f"{self._reads} reads of {self._bytes} bytes")
        if self._noted is not None:
            self._noted[va, size] = None

    def _watched(self, va: int, size: int) -> bytes:
        self.note(va, size)
        return self._read(va, size)

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count the reads in the `with` block, from 0 on. Raises: Runaway (in the block: too many reads)."""
        self._reads = 0
        self._bytes = 0
        # An attribute of the object goes before the class's method.
        self.memory.read = self._watched  # type: ignore[method-assign]
        try:
            yield
        finally:
            del self.memory.read

    def fields(self, read: Callable[[], object], rnd: random.Random) -> list[Field]:
        """Call `read`, and return the words of guest memory that it reads.

        Of a read of more than _WHOLE words, return random words, chosen by `rnd`.
        """
        self._noted = {}
        with self.counting():
            answer(read)
        pieces, self._noted = self._noted, None
        found: dict[Field, None] = {}
        for va, size in pieces:
            words = range(va, va + size, _WORD)
            for at in words if len(words) <= _WHOLE else rnd.sample(words, _WHOLE):
                with suppress(MemoryFault):
                    found[Field(at, self.memory.translate(at), min(_WORD, va + size - at))] = None
        return list(found)


def values(field: Field, word_size: int) -> list[int]:
    """Return the values to which a field is set, one after the other.

    They are the field's own address, addresses near it, 0, an address that is not canonical, one that is not
    aligned, and huge numbers.
    """
    own = field.va - field.va % word_size
    wild = (own, own + 2 * word_size, own - 2 * word_size, 0, NOT_CANONICAL, own + 3, 1 << 20, 1 << 32, -1)
    return list(dict.fromkeys(value & (1 << 8 * field.size) - 1 for value in wild))


@contextmanager
def damaged(memory: GuestMemory, field: Field, value: int) -> Iterator[None]:
    """Set a field to a value during the `with` block."""
    where = slice(field.pa, field.pa + field.size)
    saved = memory.ram[where]
    memory.ram[where] = value.to_bytes(field.size, "little")
    try:
        yield
    finally:
        memory.ram[where] = saved


def answer(read: Callable[[], object]) -> None:
    """Call a reader, and ignore the exceptions that it may raise."""
    with suppress(KernelError, MemoryFault):
        read()


def attack(
    watched: Watched, readers: Readers, rnd: random.Random, limit: int | None = None
) -> Iterator[tuple[str, Field, int]]:
    """Damage each field that a reader reads, and call all readers; yield each case after it.

    If a reader has more than `limit` cases, `limit` random cases are used. Raises: Runaway, and exceptions of
    a reader except KernelError and MemoryFault.
    """
    memory = watched.memory
    for name, read in readers.items():
        fields = watched.fields(read, rnd)
        cases = [(field, value) for field in fields for value in values(field, memory.word_size)]
        for field, value in cases if limit is None or len(cases) <= limit else rnd.sample(cases, limit):
            with damaged(memory, field, value):
                for victim in readers.values():
                    with watched.counting():
                        answer(victim)
            yield name, field, value
