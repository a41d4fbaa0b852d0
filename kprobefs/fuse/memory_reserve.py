"""MemoryReserve: emergency memory for requests that read or release, while the host has no memory."""

from __future__ import annotations

import ctypes
import logging
import mmap
import threading
from time import monotonic

log = logging.getLogger("kprobefs.fuse.memory_reserve")

HEADROOM = 32 << 20
"""Bytes that must be free for a request that creates something. Usual requests need less memory."""
RESERVE = 12 << 20
"""Size of the reserve in bytes: several times the text of a long list or of a full trace buffer."""
FLOOR = 4 << 20
"""Number of bytes that malloc(3) must still be able to allocate for an open or a read of a file.

If fewer are left, because the host has no memory, these requests fail with ENOMEM. Otherwise a library could
abort the process, as libraries do if malloc(3) fails.
"""
ROOM = 512 << 10
"""Size in bytes of an anonymous mapping that is unmapped when the reserve is freed.

Its memory is then available for pages of libfuse's table of names, and for threads.
"""
LOOK = 0.01
"""Seconds between two checks of the free memory. Requests between two checks take less than HEADROOM."""
_PIECE = 100_000
"""Size in bytes of each piece of the reserve.

The size is below _MAPPED. For a larger piece, malloc(3) would make a mapping, and would unmap it when the
piece is freed.
"""
_M_ARENA_MAX = -8
_M_MMAP_THRESHOLD = -3
_MAPPED = 132 << 10
"""Size in bytes from which malloc(3) maps an allocation, unless freed memory has space for it.

The value exceeds the longest reply to a READ. Such a reply must not be mapped, because the first use of each
mapped page causes a page fault.
"""

ENDING = (b"", b"0", b"nop")
"""Contents of the writes that only clear or disable something, and therefore need no memory."""
ENDING_LINE = b"-:"
"""Start of a line that deletes an event."""
ENDING_WORD = b"!"
"""Start of a word that removes a function, an event or a trigger.

A line of only such words needs no memory. The condition after ` if ` does not count.
"""


def share_heap() -> None:
    """Make all threads use one heap of malloc(3): a thread with its own heap can't use the reserve.

    No other thread may have started. If a thread has already made a heap of its own, malloc(3) continues to
    use that heap. Then the reserve may be in one heap, and a request may need the other.
    """
    libc = ctypes.PyDLL(None)
    # musl has only one heap.
    if hasattr(libc, "mallopt"):
        libc.mallopt(_M_ARENA_MAX, 1)
        # glibc raises the threshold to the size of a freed mapping. Large tables would then leave holes.
        libc.mallopt(_M_MMAP_THRESHOLD, _MAPPED)


class MemoryReserve:
    """Pieces of malloc(3)'s heap that are kept, and are freed for requests when the host has no memory."""

    def __init__(self) -> None:
        self._libc = ctypes.PyDLL(None)
        self._libc.malloc.argtypes = (ctypes.c_size_t,)
        self._libc.malloc.restype = ctypes.c_void_p
        self._libc.free.argtypes = (ctypes.c_void_p,)
        self._libc.free.restype = None
        self._pieces: list[int] = []
        self.next_check = 0.0
        """Monotonic time from which a request has to call check(); 0.0 if every request has to."""
        self._room: mmap.mmap | None = None
        self._lock = threading.Lock()
        """Lock around changes of the pieces, because all worker threads call check()."""
        self.is_scarce = False
        """Whether the host is short of memory: the last check failed, or give_back() was called after it."""
        self.is_spent = False
        """Whether less than FLOOR bytes were free at the last check, because open files use the reserve."""

    def check(self) -> None:
        """Free the reserve if less than HEADROOM is free; otherwise allocate it.

        Each request calls this method first, except before `next_check`. If another thread is checking, do
        nothing.
        """
        # Another thread is checking, and one check is enough.
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
            log.warning("the host has memory again")

    def give_back(self) -> None:
        """Free the reserve; check() allocates it again when the host has memory."""
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
            log.warning(
                "the host has no memory: only reads and requests that release something are served meanwhile"
            )

    def allows(self, data: bytes) -> bool:
        """Return True if the host has memory for a write of `data`, or if the write needs none."""
        return not self.is_scarce or data.strip() in ENDING or all(map(_ends, data.strip().split(b"\n")))

    def _take(self) -> None:
        """Allocate the reserve. Raises: OSError, MemoryError (no memory; the next check tries again)."""
        while self._pieces:
            self._libc.free(self._pieces.pop())
        for _ in range(RESERVE // _PIECE + 1):
            piece = self._libc.malloc(_PIECE)
            if not piece:
                raise MemoryError("no memory to keep")
            self._pieces.append(piece)
        # Invariant: _room comes last, since it says that the reserve is complete.
        self._room = _map(ROOM)


def _ends(line: bytes) -> bool:
    """Return True if a write of `line` to a control file only removes something, and so needs no memory.

    Such a line deletes an event (`-:EVENT`), or each of its words before ` if ` begins with `!`. These words
    remove functions, events or a trigger.
    """
    words = line.partition(b" if ")[0].split()
    return line.startswith(ENDING_LINE) or (
        bool(words) and all(word.startswith(ENDING_WORD) for word in words)
    )


def _map(size: int) -> mmap.mmap:
    return mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
