"""Machine code that is written as a listing: the bytes of each instruction, and its assembly text.

A line is `BYTES | INSTRUCTION`. The bytes are hexadecimal numbers and these fields:

- `rel32:NAME`: the distance from the end of the field to the symbol, 4 bytes;
- `imm32:NAME` and `imm64:NAME`: the low 4 or 8 bytes of the symbol's value;
- `org:OFFSET`, without an instruction: the code continues at this offset, and INT3 fills the gap.

The instruction is for the reader. A test assembles the instruction and compares the bytes.
"""

from __future__ import annotations

from collections.abc import Mapping

_INT3 = b"\xcc"
_SIZES = {"imm32": 4, "imm64": 8}
_REL32_SIZE = 4


def machine_code(listing: str, at: int = 0, symbols: Mapping[str, int] | None = None) -> bytes:
    """Return the bytes of a listing. `at` is the address of the first byte. `symbols` maps name -> value.

    Raises: KeyError (no such symbol), OverflowError (a symbol is too far away).
    """
    known = symbols or {}
    code = bytearray()
    for line in listing.splitlines():
        for field in line.partition("|")[0].split():
            kind, _, name = field.partition(":")
            if not name:
                code += bytes.fromhex(kind)
            elif kind == "org":
                code = code.ljust(int(name, 16), _INT3)
            elif kind == "rel32":
                distance = known[name] - (at + len(code) + _REL32_SIZE)
                code += distance.to_bytes(_REL32_SIZE, "little", signed=True)
            else:
                size = _SIZES[kind]
                code += (known[name] & (1 << 8 * size) - 1).to_bytes(size, "little")
    return bytes(code)
