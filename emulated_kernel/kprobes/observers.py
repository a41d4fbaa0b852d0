"""Observers: determines which data of a system call armed probes and tracers can read, as a Sight."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.registry import Kprobes
from emulated_kernel.kprobes.sight import LimitedSight, Sight
from emulated_kernel.machine.text.text import OriginalBytes

MAX_WORDS = 16
"""If more words of the text than this are patched, sight() returns Sight.MEMORY.

Otherwise it examines the probes that have patched the words.
"""
MAX_PROBES = 64
"""Maximum number of probes that are examined; if more have patched the text, sight() returns MEMORY.

After each change of a probe, all probes are examined again.
"""
_LONGEST = 16
"""Upper bound of the size in bytes of the text that a single probe has patched."""


class Observers:
    """Determines which data of a system call the probes and tracers that have patched the text can read."""

    def __init__(
        self, kprobes: Kprobes, originals: OriginalBytes, breakpoint_size: int, loops: Iterable[range]
    ) -> None:
        """Observe the patches that `originals` records.

        `breakpoint_size`: bytes that a breakpoint overwrites. `loops`: address ranges of functions in which
        the number of hits depends on the characters of a path.
        """
        self._originals = originals
        self._table = kprobes.table
        self._sites = kprobes.sites
        self._fentry_size = kprobes.probe_checker.fentry_size
        self._breakpoint_size = breakpoint_size
        self._loops = tuple(loops)
        self._lock = kprobes.lock
        self._known = -1, -1, Sight.MEMORY
        """Result of the last check, and the state for which the result is valid.

        The items are the number of changes of `originals`, the number of changes of the ProbeTable, and the
        Sight. They are in one tuple, so that a thread without the lock reads three items that belong
        together.
        """

    def sight(self) -> Sight:
        """Return the highest Sight of all probes that have patched the text; Sight.NOTHING if there are none.

        A Sight is the kind of data that the handlers of a probe can read.

        A tracer, or a patch that belongs to no probe, counts as Sight.MEMORY. If the text or the probes have
        changed since the last call, the result is computed again under the control lock.
        """
        if self._sites is not None and self._sites.has_tracers:
            return Sight.MEMORY
        patches, probes, seen = self._known
        if patches == self._originals.changes and probes == self._table.changes:
            return seen
        with self._lock.observing():
            seen = self._find_sight()
            self._known = self._originals.changes, self._table.changes, seen
        return seen

    def _find_sight(self) -> Sight:
        if len(self._originals.words) > MAX_WORDS:
            return Sight.MEMORY
        heads = self._find_heads()
        if heads is None or sum(len(head.members) for head in heads) > MAX_PROBES:
            return Sight.MEMORY
        members = (member for head in heads for member in head.members)
        return max(map(_sight_of, members), default=Sight.NOTHING)

    def _find_heads(self) -> Sequence[AggrKprobe] | None:
        """Return the AggrKprobes that have patched the text; None if any patch cannot be examined.

        A patch cannot be examined if it is not a probe's, or is within one of `loops`; see __init__().
        """
        found: list[AggrKprobe] = []
        patch = range(0)
        for address in self._originals:
            if address in patch:
                continue
            head = self._head_at(address)
            if head is None or any(address in loop for loop in self._loops):
                return None
            patch = range(head.address, head.address + self._size(head))
            found.append(head)
        return found

    def _head_at(self, address: int) -> AggrKprobe | None:
        """Return the AggrKprobe for which the byte at `address` is patched; None for other patches."""
        for start in range(address, address - _LONGEST, -1):
            head = self._table.get(start)
            if head is not None:
                return head if address < start + self._size(head) else None
        return None

    def _size(self, head: AggrKprobe) -> int:
        if head.is_ftrace:
            return self._fentry_size
        if head.is_patched and head.detour is not None:
            return len(head.detour.jump)
        return self._breakpoint_size


def _sight_of(kprobe: Kprobe) -> Sight:
    return kprobe.sight if isinstance(kprobe, LimitedSight) else Sight.MEMORY
