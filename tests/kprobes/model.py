"""A simple model of the probe registry: the registered, disabled and armed probes after each operation."""

from __future__ import annotations

from dataclasses import dataclass, field

from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.table import hash_address


@dataclass(eq=False)
class Entry:
    """One registered probe, and the hits that its handlers must have seen."""

    kprobe: Kprobe
    disabled: bool
    kind: str = "k"
    hits: int = 0
    missed: int = 0


@dataclass
class Point:
    """The probes of one address, newest first, and the disabled flag of the object in Linux's hash table."""

    disabled: bool
    shared: bool = False
    entries: list[Entry] = field(default_factory=list)


class Model:
    """A model of Linux 6.1's registry of probes, which patches no code."""

    def __init__(self, bits: int = 64) -> None:
        self._bits = bits
        self.points: dict[int, Point] = {}
        self.all_disarmed = False

    def register(self, addr: int, kprobe: Kprobe, disabled: bool, kind: str = "k") -> None:
        point = self.points.get(addr)
        if point is None:
            point = self.points[addr] = Point(disabled)
        else:
            point.shared = True
            point.disabled = point.disabled and disabled
        is_last = kind == "j"
        point.entries.insert(len(point.entries) if is_last else 0, Entry(kprobe, disabled, kind))

    def unregister(self, addr: int, entry: Entry) -> None:
        self.disable(addr, entry)
        self.points[addr].entries.remove(entry)
        if not self.points[addr].entries:
            del self.points[addr]

    def forget(self, addr: int, kprobe: Kprobe) -> None:
        """Undo the registration of a probe, because a later probe of the array was refused."""
        self.unregister(addr, next(e for e in self.points[addr].entries if e.kprobe is kprobe))

    def disable(self, addr: int, entry: Entry) -> None:
        point = self.points[addr]
        entry.disabled = True
        if all(e.disabled for e in point.entries):
            point.disabled = True

    def enable(self, addr: int, entry: Entry) -> None:
        """Enable a probe.

        As in Linux, the flag of the address stays set while all probes are disarmed. The only probe of an
        address uses this flag as its own.
        """
        point = self.points[addr]
        if point.shared or not self.all_disarmed:
            entry.disabled = False
        if not self.all_disarmed:
            point.disabled = False

    def armed(self) -> set[int]:
        """Return the addresses that have a breakpoint."""
        return set() if self.all_disarmed else {a for a, p in self.points.items() if not p.disabled}

    def called(self, counts: dict[int, int]) -> None:
        """Count a call of a function as hits of its enabled probes.

        `counts`: instruction -> number of executions in the call.
        """
        for addr in self.armed():
            for entry in self.points[addr].entries:
                if not entry.disabled:
                    entry.hits += counts.get(addr, 0)

    def missed(self, counts: dict[int, int]) -> None:
        """Count a call of a function by a handler as misses of its probes.

        `counts`: instruction -> number of executions in the call. As in Linux, disabled probes also count
        misses.
        """
        for addr in self.armed():
            for entry in self.points[addr].entries:
                entry.missed += counts.get(addr, 0)

    def listed(self) -> list[tuple[int, str, bool]]:
        """Return address, kind and disabled flag of each line of kprobes/list."""
        latest_first = reversed(list(self.points.items()))
        ordered = sorted(latest_first, key=lambda item: hash_address(item[0], self._bits))
        return [(addr, e.kind, e.disabled) for addr, point in ordered for e in point.entries]
