"""Comparison of kernel text with its ledger, which proves that only pokes have written the text."""

from __future__ import annotations

from emulated_kernel.machine.text.text import Text
from emulated_kernel.util.abi import PAGE_SIZE


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
        for page in range(0, end - start, PAGE_SIZE):
            part = slice(page, page + PAGE_SIZE)
            if expected[part] != current[part]:
                pairs = zip(expected[part], current[part], strict=True)
                wrong += [start + at for at, (old, now) in enumerate(pairs, page) if old != now]
    return sorted(wrong)
