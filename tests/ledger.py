"""Whether text is what its ledger says: the proof that nothing but a poke ever wrote it."""

from __future__ import annotations

from emulated_kernel.machine.text.text import Text


def ledger_mismatches(text: Text) -> list[int]:
    """Addresses where text and ledger disagree with the original; empty, or something else wrote text."""
    wrong = []
    for start, end, original in text._originals:
        expected = bytearray(original)
        current = text.current(start, end - start)
        for address in [a for a in text.ledger if start <= a < end]:
            at = address - start
            if text.ledger[address] != original[at] or current[at] == original[at]:
                wrong.append(address)
            expected[at] = current[at]
        if expected != current:
            wrong += [start + i for i in range(end - start) if expected[i] != current[i]]
    return sorted(wrong)
