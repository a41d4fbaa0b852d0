"""The reserve of the host's memory: where none is to be had, what looks and what ends is answered from it."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from time import monotonic

log = logging.getLogger("kprobefs.fuse.memory_reserve")

HEADROOM = 32 << 20
"""Bytes that have to be there for a request that makes something: more than any takes that isn't huge."""
RESERVE = 12 << 20
"""Bytes: what a long list and the trace of a full buffer are rendered in, some times over."""
FLOOR = 4 << 20
"""Bytes of that without which nothing is opened or read: libraries abort where they get nothing at all."""
ROOM = 512 << 10
"""Bytes of address space: libfuse maps a page for some names. A thread, and Python, map more at once."""
LOOK = 0.01
"""Seconds between two looks: what is asked meanwhile takes less than the headroom."""
_PIECE = 100_000
"""Bytes; from 128 KiB on malloc(3) would map each piece by itself, and unmap it when it is freed."""
_M_ARENA_MAX = -8
_M_MMAP_THRESHOLD = -3
_MAPPED = 128 << 10
"""Bytes from which on a piece is mapped by itself, as long as nothing that was freed has room for it."""

ENDING = (b"", b"0", b"nop")
"""Whole writes that take something away: clear, disable."""
ENDING_LINE, ENDING_WORD = b"-:", b"!"
"""What a line begins with that does so, or each of its words in front of a condition."""


def share_heap() -> None:
    """All threads that come have one heap: in one of its own a thread would find nothing of the reserve."""
    libc = ctypes.PyDLL(None)
    # musl has one heap anyhow.
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        # glibc raises it to what was freed once: tables of a whole kernel would leave holes in the heap.
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED)


class MemoryReserve:
    """Freed pieces of malloc's one heap, of which whoever allocates is served when the host has no more.

    A limit may be lowered below what is used already; so nothing that has to be mapped helps, and what is
    given back must not go back to the host: the last piece stays at the heap's top.
    """

    def __init__(self) -> None:
        self._libc = ctypes.PyDLL(None)
        self._libc.malloc.argtypes = (ctypes.c_size_t,)
        self._libc.malloc.restype = ctypes.c_void_p
        self._libc.free.argtypes = (ctypes.c_void_p,)
        self._libc.free.restype = None
        self._pieces: list[int] = []
        self.next_check = 0.0
        """The monotonic time from which on a request begins with look(); 0.0: each one does."""
        self._room: mmap.mmap | None = None
        self._lock = threading.Lock()
        """Held where the pieces change: all loops look."""
        self.is_scarce = False
        """The host has no memory, or had none a moment ago."""
        self.is_spent = False
        """Even the reserve is nearly gone, to who holds what was rendered for them."""

    def check(self) -> None:
        """Before a request: give the reserve back where there is no headroom, and take it where there is."""
        # Whoever has it looks, and one look is enough.
        if not self._lock.acquire(blocking=False):
            return
        try:
            self._look()
            self.next_check = 0.0 if self.is_scarce else monotonic() + LOOK
        finally:
            self._lock.release()

    def _look(self) -> None:
        try:
            _map(HEADROOM).close()
            if self._room is None:
                self._take()
        except (OSError, MemoryError):
            self._give_back()
            floor = self._libc.malloc(FLOOR)
            self._libc.free(floor)
            self.is_spent = not floor
            return
        if self.is_scarce:
            self.is_scarce = False
            self.is_spent = False
            log.warning("there is memory again")

    def give_back(self) -> None:
        """From now on until memory is there again."""
        with self._lock:
            self._give_back()

    def _give_back(self) -> None:
        if self._room is not None:
            self._room.close()
            self._room = None
        while len(self._pieces) > 1:
            self._libc.free(self._pieces.pop(0))
        if not self.is_scarce:
            self.is_scarce = True
            self.next_check = 0.0
            log.warning("no memory: files can be read and things ended, but not made, until there is again")

    def allows(self, data: bytes) -> bool:
        """Whether this may be written now: it takes something away, or there is memory."""
        return not self.is_scarce or data.strip() in ENDING or all(map(_ends, data.strip().split(b"\n")))

    def _take(self) -> None:
        """Raises: OSError, MemoryError (it isn't there; the next look tries again)."""
        while self._pieces:
            self._libc.free(self._pieces.pop())
        for _ in range(RESERVE // _PIECE + 1):
            piece = self._libc.malloc(_PIECE)
            if not piece:
                raise MemoryError("no memory to keep")
            self._pieces.append(piece)
        # What says that all of it is there comes last.
        self._room = _map(ROOM)


def _ends(line: bytes) -> bool:
    """Whether a line deletes an event, or takes functions, events or a trigger out of a list."""
    words = line.partition(b" if ")[0].split()
    return line.startswith(ENDING_LINE) or (
        bool(words) and all(word.startswith(ENDING_WORD) for word in words)
    )


def _map(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
