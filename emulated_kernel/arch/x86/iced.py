"""What the processor makes of code: iced-x86, which is imported with the first instruction."""

from __future__ import annotations

from typing import Any


def iced_decoder(code: bytes, addr: int, bits: int) -> Any:
    """An iced-x86 decoder that doesn't check what the processor would refuse, as Linux doesn't.

    Imported here: loading it costs 25 ms, and listing a mount needs none of it.
    """
    from iced_x86 import Decoder, DecoderOptions

    return Decoder(bits, code, DecoderOptions.NO_INVALID_CHECK, ip=addr)


def is_valid(code: bytes, bits: int = 64) -> bool:
    """Whether the processor has the instruction at the start of `code`."""
    return bool(iced_decoder(code, 0, bits).decode())
