"""ProbeTable: the probe or aggregator probe of each probed address, and whether all probes are disarmed."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.kprobes.kprobe import AggrKprobe, Kprobe

KPROBE_HASH_BITS = 6
"""Number of bits of a bucket's index. Linux has 64 hash buckets, and lists them in order."""
GOLDEN_RATIO = {64: 0x61C8864680B583EB, 32: 0x61C88647}


class ProbeTable:
    """The probes by address: single ones and aggregators. Mirrors: kernel/kprobes.c:kprobe_table (v6.1)."""

    def __init__(self, bits: int = 64) -> None:
        """Make a table for addresses of `bits` bits."""
        self._bits = bits
        self._probes: dict[int, Kprobe] = {}
        self._buckets: tuple[dict[int, Kprobe], ...] = tuple({} for _ in range(1 << KPROBE_HASH_BITS))
        """Buckets: address -> probe, in the order in which addresses were first probed."""
        self.all_disarmed = False
        """Whether all probes are disarmed. Mirrors: kernel/kprobes.c:kprobes_all_disarmed (v6.1)."""

    def get(self, address: int) -> Kprobe | None:
        return self._probes.get(address)

    def __iter__(self) -> Iterator[Kprobe]:
        """Iterate over the entries in the order in which addresses were first probed."""
        return iter(self._probes.values())

    def buckets(self, start: int = 0) -> Iterator[Iterator[Kprobe]]:
        """Return the probes of each hash bucket from `start` on, the latest probed address first."""
        return (reversed(bucket.values()) for bucket in self._buckets[start:])

    def add(self, probe: Kprobe) -> None:
        """Add a probe, or replace the entry at its address with it."""
        address = probe.address
        self._probes[address] = probe
        self._buckets[hash_address(address, self._bits)][address] = probe

    def remove(self, probe: Kprobe) -> None:
        address = probe.address
        del self._probes[address]
        del self._buckets[hash_address(address, self._bits)][address]

    def valid(self, kprobe: Kprobe) -> Kprobe | None:
        """Return the entry to which this probe itself belongs.

        Mirrors: kernel/kprobes.c:__get_valid_kprobe (v6.1).
        """
        if kprobe.addr is None:
            return None
        head = self._probes.get(kprobe.addr)
        return head if head is not None and head in (kprobe, kprobe.state.aggregator) else None

    def is_armed(self, kprobe: Kprobe) -> bool:
        """Return True if text is patched for the probe's address."""
        head = self.valid(kprobe)
        return head is not None and not head.is_disabled and not self.all_disarmed

    def is_patched(self, kprobe: Kprobe) -> bool:
        """Return True if the text has a jump to the probe's detour."""
        head = self.valid(kprobe)
        return isinstance(head, AggrKprobe) and head.is_patched

    def runs_in_detour(self, kprobe: Kprobe) -> bool:
        """Return True if hits continue in the probe's detour, by its jump or by the breakpoint."""
        head = self.valid(kprobe)
        return isinstance(head, AggrKprobe) and head.is_optimized


def hash_address(address: int, bits: int = 64) -> int:
    """Return the hash bucket of an address of `bits` bits. Mirrors: include/linux/hash.h:hash_ptr."""
    return (address * GOLDEN_RATIO[bits] & (1 << bits) - 1) >> (bits - KPROBE_HASH_BITS)
