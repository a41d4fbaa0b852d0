"""Assembly of single instructions with keystone, from texts with hexadecimal numbers and no symbols."""

from __future__ import annotations

import re
from typing import Any, cast

from emulated_kernel.arch.program.asm_source import Statement
from emulated_kernel.util.lazy_pattern import lazy_pattern

NUMBER = lazy_pattern(r"(?<![\w.$])(0[xX][0-9a-fA-F]+|0[bB][01]+|\d+)(?![\w.$])")


def hexadecimal_numbers(text: str) -> str:
    """Return the text of a statement with all its numbers in hexadecimal.

    Keystone would read a decimal number as hexadecimal.
    """
    return NUMBER.sub(_hexadecimal, text)


def _hexadecimal(number: re.Match[str]) -> str:
    return hex(int(number[0], 0 if number[0][1:2].isalpha() else 10))


def keystone_engine(architecture: str, mode: str) -> Any:
    """Return an assembler that refuses symbols.

    `architecture` and `mode` are keystone's names, without KS_ARCH_ and KS_MODE_.
    """
    import keystone

    values = getattr(keystone, f"KS_ARCH_{architecture}"), getattr(keystone, f"KS_MODE_{mode}")
    engine = cast("Any", keystone).Ks(*values)
    engine.sym_resolver = lambda _symbol, _value: False
    return engine


def assemble_one(engine: Any, statement: Statement, text: str, at: int) -> bytes:
    """Return the machine code of `text` for the address `at`; empty if keystone makes no code.

    `text`: the statement as keystone reads it. `statement`: the original, for the error message.

    Raises: KernelError EINVAL (keystone refuses the text).
    """
    from keystone.keystone import KsError

    try:
        encoding, _ = engine.asm(text, at, True)
    except KsError as error:
        raise statement.refused(f"keystone: {error.message}") from error
    return bytes(encoding or b"")
