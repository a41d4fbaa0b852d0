"""FtraceHash: a set of functions that is iterated in the order of Linux's hash table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

DEFAULT_BITS = 10
"""Binary logarithm of the number of buckets of a new table.

Mirrors: kernel/trace/ftrace.c:FTRACE_HASH_DEFAULT_BITS (v6.1).
"""
MAX_BITS = 12
"""Maximum of the binary logarithm of the number of buckets.

Mirrors: kernel/trace/ftrace.c:FTRACE_HASH_MAX_BITS (v6.1).
"""
_GOLDEN_RATIO = {32: 0x61C88647, 64: 0x61C8864680B583EB}


class FtraceHash:
    """A hash table of addresses. Iteration goes bucket by bucket; in a bucket, the newest address is first.

    Mirrors: kernel/trace/trace.h:struct ftrace_hash, kernel/trace/ftrace.c:add_hash_entry (v6.1).
    """

    def __init__(self, sites: Iterable[int] = (), bits: int = DEFAULT_BITS) -> None:
        """Create a table with 2**`bits` buckets that contains the addresses `sites`."""
        self._bits = bits
        self._buckets: dict[int, list[int]] = {}
        for site in sites:
            self.add(site)

    @classmethod
    def moved(cls, sites: Iterable[int]) -> FtraceHash:
        """Return a table of the addresses `sites`, sized as Linux sizes a set that replaces another.

        For N sites, the number of buckets is the smallest power of two that is greater than N // 2, but at
        most 2**MAX_BITS.
        Mirrors: kernel/trace/ftrace.c:dup_hash (v6.1).
        """
        found = list(sites)
        return cls(found, min((len(found) // 2).bit_length(), MAX_BITS))

    def __iter__(self) -> Iterator[int]:
        for _, bucket in sorted(self._buckets.items()):
            yield from reversed(bucket)

    def __contains__(self, site: int) -> bool:
        return site in self._buckets.get(self._key(site), ())

    def add(self, site: int) -> None:
        """Add the address `site`, which must not be in the table."""
        self._buckets.setdefault(self._key(site), []).append(site)

    def remove(self, site: int) -> None:
        """Remove the address `site`, which must be in the table."""
        self._buckets[self._key(site)].remove(site)

    def _key(self, site: int) -> int:
        """Return the index of an address's bucket. Mirrors: include/linux/hash.h:hash_long (v6.1)."""
        if not self._bits:
            return 0
        width = 64 if site >> 32 else 32
        return (site * _GOLDEN_RATIO[width] & (1 << width) - 1) >> (width - self._bits)
