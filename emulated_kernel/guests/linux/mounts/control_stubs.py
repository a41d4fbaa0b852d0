"""ControlStubs: guest code of control files' operations, which traps to the host, and offsets in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from emulated_kernel.util.fast_dataclass import dataclass


@dataclass(frozen=True)
class ControlStubs:
    """Guest code of the lookups and file operations of control files, and offsets in bytes in this code.

    At each of the offsets `looked_up`, `woken` and `traps`, the code has a breakpoint that traps to the host.
    The breakpoint `looked_up` is in a lookup, after simple_lookup() has returned. The breakpoint `woken` is
    where a task continues that has slept in a call. At the other offsets, the host lets the guest continue.
    """

    made: Callable[[int, Mapping[str, int]], bytes]
    """Function that returns the code; it takes the code's address and a map: symbol -> address."""
    size: int
    looked_up: int
    instantiate: int
    """Offset of the call of d_instantiate(). A lookup that finds a file or directory continues there.

    The host sets the arguments of the call. Other lookups continue at `lookup_ends`.
    """
    lookup_ends: int
    operations: Mapping[str, int]
    """Name of a file operation (open, read or write) -> offset of its first instruction."""
    traps: tuple[int, ...]
    """Offsets of the breakpoints in the file operations."""
    is_stream: int
    """Offset at which the open of a file without a position (a stream) continues after its trap."""
    opened: int
    """Offset at which the open of a file with a position continues after its trap."""
    copy: int
    sleep: int
    woken: int
    returns: int
    copy_to_user: str = "_copy_to_user"
    """Symbol of the function that copies data to user memory; it returns the number of bytes not copied."""
