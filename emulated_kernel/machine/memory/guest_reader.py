"""GuestReader: reads lists, tables and strings of a guest, which may be hostile, within fixed limits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Protocol, TypeVar

from emulated_kernel.machine.traps.trap import GuestFault, MemoryFault
from emulated_kernel.util.abi import PAGE_SIZE

MAX_STEPS = 1 << 16
"""Default of the maximum number of list nodes and table entries that one reader follows."""
MAX_BYTES = 16 << 20
"""Default of the maximum number of bytes that one reader reads."""
_MAX_REPORTS = 64
"""Maximum number of kinds of damaged data that are reported."""
_T = TypeVar("_T")
_log = logging.getLogger("kprobefs.guest")


class ReadableMemory(Protocol):
    """Interface of memory that is read by virtual address."""

    @property
    def word_size(self) -> int: ...

    def read(self, va: int, size: int, /) -> bytes: ...


class DamageReports:
    """Reports damaged data of one guest. Each kind of data, such as the task list, is reported only once."""

    def __init__(self) -> None:
        self._known: set[str] = set()
        self.tell: Callable[[str], object] | None = None
        """Function to call with the text of each report, for example to log it; None before it is set."""

    def report(self, what: str, why: object) -> None:
        """Log that `what` is damaged, with the reason `why`, and that a part of it is left out.

        Do nothing if `what` was reported before, or after _MAX_REPORTS reports.
        """
        if what in self._known or len(self._known) >= _MAX_REPORTS:
            return
        self._known.add(what)
        text = f"the {what} is damaged, and a part of it is left out: {why}"
        _log.warning("guest: %s", text)
        if self.tell is not None:
            self.tell(text)

    @contextmanager
    def left_out(self, what: str) -> Iterator[None]:
        """Suppress a MemoryFault or GuestFault of the `with` block, and report it as damage of `what`.

        `what`: name of the data in the report.
        """
        try:
            yield
        except (MemoryFault, GuestFault) as fault:
            self.report(what, fault)


class GuestReader:
    """Reads one structure of a stopped guest. Each count and pointer in guest memory may be wrong.

    `what` is the structure's name in the reports of damage. `steps` and `size` limit the steps and bytes of
    all of this reader's calls together. If the guest's data are damaged, methods raise MemoryFault. Damage is
    an address that is not mapped, more data than the limits allow, a pointer that is not aligned, or a
    circular list.
    """

    def __init__(
        self,
        memory: ReadableMemory,
        what: str,
        damage: DamageReports,
        *,
        steps: int = MAX_STEPS,
        size: int = MAX_BYTES,
    ) -> None:
        self._memory = memory
        self.what = what
        self.damage = damage
        self.word_size = memory.word_size
        self._steps = steps
        self._left = size

    def read(self, va: int, size: int) -> bytes:
        """Read `size` bytes. Raises: MemoryFault (not mapped, or more than the reader's limit allows)."""
        if not 0 <= size <= self._left:
            raise MemoryFault(va, f"{size} bytes are too many")
        self._left -= size
        data = self._memory.read(va, size)
        if len(data) != size:
            raise MemoryFault(va)
        return data

    def number(self, va: int, size: int) -> int:
        """Read a little-endian number of `size` bytes. Raises: MemoryFault (as read())."""
        return int.from_bytes(self.read(va, size), "little")

    def word(self, va: int) -> int:
        """Read a pointer or an `unsigned long`. Raises: MemoryFault (as read())."""
        return self.number(va, self.word_size)

    def u32(self, va: int) -> int:
        """Read a 32-bit number. Raises: MemoryFault (as read())."""
        return self.number(va, 4)

    def table(self, va: int, count: int, entry: int) -> bytes:
        """Read a table of `count` entries with `entry` bytes each.

        Raises: MemoryFault (as read(), or more entries than the reader's limit allows).
        """
        self._take_steps(va, count)
        return self.read(va, count * entry) if count else b""

    def cstring(self, va: int, limit: int) -> bytes:
        """Read bytes up to a NUL (excluded), or `limit` bytes if there is none.

        Raises: MemoryFault (as read()).
        """
        parts: list[bytes] = []
        while limit > 0:
            size = min(limit, PAGE_SIZE - va % PAGE_SIZE)
            head, nul, _ = self.read(va, size).partition(b"\0")
            # Only bytes that are kept count; a short string before the end of a page is not damage.
            self._left += size - len(head)
            parts.append(head)
            if nul:
                break
            va += size
            limit -= size
        return b"".join(parts)

    def nodes(self, head: int, limit: int = MAX_STEPS) -> Iterator[int]:
        """Yield the address of each node of the list whose head (struct list_head) is at `head`.

        Raises: MemoryFault (after the intact nodes: a bad pointer, a circle, or more than `limit` nodes).
        Mirrors: include/linux/list.h:list_for_each (v6.1).
        """
        yield from self.chain(self.word(head), head, limit=limit)

    def chain(self, node: int, end: int = 0, link: int = 0, limit: int = MAX_STEPS) -> Iterator[int]:
        """Yield the address `node` of a list's node, and the addresses of its successors.

        `end`: value of the last node's pointer. `link`: offset of the pointer to the next node in a node.
        `limit`: maximum number of nodes.
        Raises: MemoryFault (an unaligned or unmapped pointer, a circle, or too many nodes).
        """
        known: set[int] = set()
        while node != end:
            if node % self.word_size:
                raise MemoryFault(node, "no list node")
            if node in known or len(known) == limit:
                raise MemoryFault(node, "a list without end")
            self._take_steps(node, 1)
            known.add(node)
            following = self.word(node + link)
            yield node
            node = following

    def each(self, nodes: Iterable[int], read: Callable[[int], _T]) -> Iterator[_T]:
        """Yield the result of `read` for each node's address; report damaged nodes and leave them out.

        If the list itself is damaged, report that, and end.
        """
        found = iter(nodes)
        while True:
            # A fault of the list itself ends it; a fault of one node concerns only this node.
            with self.damage.left_out(self.what):
                for node in found:
                    yield read(node)
                return

    def _take_steps(self, va: int, count: int) -> None:
        if not 0 <= count <= self._steps:
            raise MemoryFault(va, f"{count} entries are too many")
        self._steps -= count
