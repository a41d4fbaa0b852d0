"""Comparison of kernel text with its ledger, which proves that only pokes have written the text."""

from __future__ import annotations

from emulated_kernel.machine.text.text import Text


def ledger_mismatches(text: Text) -> list[int]:
    """Return the addresses at which the text is neither original nor a poke that the ledger records.

    If the list is not empty, something else has written the text.
    """
    wrong = []
    for start, end, original in text._originals:
        expected = bytearray(original)
        current = text.current(start, end - start)
        for address in [each for each in text.ledger if start <= each < end]:
            at = address - start
            if text.ledger[address] != original[at] or current[at] == original[at]:
                wrong.append(address)
            expected[at] = current[at]
        if expected != current:
            wrong += [start + at for at in range(end - start) if expected[at] != current[at]]
    return sorted(wrong)
