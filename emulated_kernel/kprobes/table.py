"""ProbeTable: what stands at which probed address, and whether anything is armed at all."""

from __future__ import annotations

from collections.abc import Iterator

from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe


class ProbeTable:
    """The probes by address: single ones and aggregators. Mirrors: kernel/kprobes.c:kprobe_table (v6.1)."""

    def __init__(self) -> None:
        self._probes: dict[int, Kprobe] = {}
        self.version = 0
        """Another one after each change of what stands where."""
        self.all_disarmed = False
        """Mirrors: kernel/kprobes.c:kprobes_all_disarmed (v6.1)."""

    def get(self, address: int) -> Kprobe | None:
        return self._probes.get(address)

    def __iter__(self) -> Iterator[Kprobe]:
        """In the order in which addresses were first probed."""
        return iter(self._probes.values())

    def put(self, probe: Kprobe) -> None:
        """Add a probe, or let it take the place of the one at its address."""
        self._probes[probe.address] = probe
        self.version += 1

    def remove(self, probe: Kprobe) -> None:
        del self._probes[probe.address]
        self.version += 1

    def valid(self, kprobe: Kprobe) -> Kprobe | None:
        """The entry that this very probe belongs to. Mirrors: kernel/kprobes.c:__get_valid_kprobe (v6.1)."""
        if kprobe.addr is None:
            return None
        head = self._probes.get(kprobe.addr)
        if head is kprobe or (isinstance(head, AggregatorProbe) and any(m is kprobe for m in head.members)):
            return head
        return None
