"""Steps: maps an address in an insn slot to the copied instruction in the slot, and to its probe."""

from __future__ import annotations

from emulated_kernel.kprobes.aggr_kprobe import AggrKprobe
from emulated_kernel.kprobes.codegen.guest_code import OutOfLine
from emulated_kernel.util.fast_dataclass import dataclass

_UNIT = 4
"""Number of low bits dropped from an address to get the key in Steps. No two slots share a key."""


@dataclass(frozen=True, eq=False, slots=True)
class Step:
    """The copy of a probed instruction in an insn slot, and its probe."""

    head: AggrKprobe
    insn: OutOfLine


class Steps:
    """Map: address in an insn slot -> Step, from the preparation of a probe until its slot is reclaimed.

    If a hit is completely guest code, Python keeps no state of the hit. So a CPU is known to be in a step
    only by its ip, which is then in a copy.
    """

    def __init__(self) -> None:
        self._at: dict[int, Step] = {}

    def add(self, head: AggrKprobe, insn: OutOfLine) -> None:
        """Add `insn`, the copy of the probe `head` in a slot; replace an earlier Step of the slot."""
        step = Step(head, insn)
        for unit in _units(insn):
            self._at[unit] = step

    def remove(self, insn: OutOfLine) -> None:
        """Remove the copy `insn`, because its slot is reclaimed."""
        for unit in _units(insn):
            self._at.pop(unit, None)

    def at(self, ip: int) -> Step | None:
        """Return the step that contains the address `ip`, or None if no step contains it.

        A step includes the lead before the copy, and the trap after it. A boosted copy is not a step.
        """
        step = self._at.get(ip >> _UNIT)
        return step if step is not None and not step.insn.boosted and ip in _addresses(step.insn) else None


def _addresses(insn: OutOfLine) -> range:
    assert insn.slot is not None
    return range(insn.slot - insn.lead, insn.slot + insn.prepared.length + 1)


def _units(insn: OutOfLine) -> range:
    addresses = _addresses(insn)
    return range(addresses.start >> _UNIT, (addresses.stop - 1 >> _UNIT) + 1)
