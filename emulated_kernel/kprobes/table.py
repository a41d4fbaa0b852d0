"""ProbeTable: maps probed addresses to AggrKprobe objects, and stores whether all probes are disarmed."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.kprobe import Kprobe

KPROBE_HASH_BITS = 6
"""Number of bits of a hash bucket's index. Linux has 64 buckets, and lists probes in the buckets' order."""
GOLDEN_RATIO = {64: 0x61C8864680B583EB, 32: 0x61C88647}


class ProbeTable:
    """Table: probed address -> AggrKprobe (the entry). Mirrors: kernel/kprobes.c:kprobe_table (v6.1)."""

    def __init__(self, bits: int = 64) -> None:
        """Make a table for addresses of `bits` bits."""
        self._bits = bits
        self._heads: dict[int, AggrKprobe] = {}
        self._buckets: tuple[dict[int, AggrKprobe], ...] = tuple({} for _ in range(1 << KPROBE_HASH_BITS))
        """Hash buckets, each a map: address -> entry, in the order in which addresses were first probed."""
        self.all_disarmed = False
        """Whether all probes are disarmed. Mirrors: kernel/kprobes.c:kprobes_all_disarmed (v6.1)."""
        self.changes = 0
        """Number of changes of entries, of their members, and of the members' handlers."""

    def get(self, address: int) -> AggrKprobe | None:
        """Return the entry of `address`, or None if no probe is there."""
        return self._heads.get(address)

    def __iter__(self) -> Iterator[AggrKprobe]:
        """Iterate over the entries in the order in which addresses were first probed."""
        return iter(self._heads.values())

    def buckets(self, start: int = 0) -> Iterator[Iterator[AggrKprobe]]:
        """Return an iterator over the hash buckets from index `start` on.

        Each item iterates over the entries of a bucket, the entry of the latest probed address first.
        """
        return (reversed(bucket.values()) for bucket in self._buckets[start:])

    def add(self, head: AggrKprobe) -> None:
        """Add `head` as the entry of its address, which must not have an entry."""
        address = head.address
        self.changes += 1
        self._heads[address] = head
        self._buckets[hash_address(address, self._bits)][address] = head

    def remove(self, head: AggrKprobe) -> None:
        """Remove the entry `head` from the table."""
        address = head.address
        self.changes += 1
        del self._heads[address]
        del self._buckets[hash_address(address, self._bits)][address]

    def valid(self, kprobe: Kprobe) -> AggrKprobe | None:
        """Return the entry of which a probe is a member; None if the probe is not registered.

        Mirrors: kernel/kprobes.c:__get_valid_kprobe (v6.1).
        """
        if kprobe.addr is None:
            return None
        head = self._heads.get(kprobe.addr)
        return head if head is not None and kprobe in head.members else None

    def is_armed(self, kprobe: Kprobe) -> bool:
        """Return True if the probe's address is armed.

        The probe itself may be disabled, if another probe of the address is enabled.
        """
        head = self.valid(kprobe)
        return head is not None and not head.is_disabled and not self.all_disarmed

    def is_patched(self, kprobe: Kprobe) -> bool:
        """Return True if the text has a jump to the probe's detour."""
        head = self.valid(kprobe)
        return head is not None and head.is_patched

    def runs_in_detour(self, kprobe: Kprobe) -> bool:
        """Return True if hits run in the probe's detour, entered by the jump or from the breakpoint."""
        head = self.valid(kprobe)
        return head is not None and head.is_optimized


def hash_address(address: int, bits: int = 64) -> int:
    """Return the index of the hash bucket of an address of `bits` bits.

    Mirrors: include/linux/hash.h:hash_ptr.
    """
    return (address * GOLDEN_RATIO[bits] & (1 << bits) - 1) >> (bits - KPROBE_HASH_BITS)
