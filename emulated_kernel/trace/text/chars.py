"""Conversion of bytes to text, splitting of commands into words, and checks of names.

Commands are parsed as Latin-1, one character per byte, so that columns of errors count bytes, and every input
can be decoded. Text for readers of a file is UTF-8 with surrogate escapes, and is encoded in the same way.
"""

from __future__ import annotations

from emulated_kernel.util.lazy_pattern import lazy_pattern

SPACES = "\t\n\v\f\r \xa0"
"""White space as in Linux: with 0xa0, without 0x1c-0x1f and 0x85. Mirrors: include/linux/ctype.h:isspace."""

ALNUM = "0-9A-Za-z\xc0-\xd6\xd8-\xf6\xf8-\xff"
"""Letters and digits of Latin-1, for use within the brackets of a regular expression.

Mirrors: include/linux/ctype.h:isalnum (v6.1).
"""
_WORD = lazy_pattern(f"[^{SPACES}]+")
_NAME = lazy_pattern(f"(?![0-9])[_{ALNUM}]+")
_SYSTEM_NAME = lazy_pattern(f"(?![0-9])[-_{ALNUM}]+")


def decode_command(data: bytes) -> str:
    """Convert the bytes of a command to text, one character per byte."""
    return data.decode("latin-1")


def to_text(command: str) -> str:
    """Convert a command from one character per byte to the text that readers of a file see.

    Bytes that are not UTF-8 become surrogates.
    """
    return command if command.isascii() else bytes_to_text(command.encode("latin-1"))


def bytes_to_text(data: bytes) -> str:
    """Convert bytes to the text that readers of a file see.

    Bytes that are not UTF-8 become surrogates.
    """
    return data.decode("utf-8", "surrogateescape")


def argv_split(command: str) -> list[str]:
    """Return the words of a command, which are separated by white space."""
    return _WORD.findall(command)


def split_at(text: str, chars: str = " \t") -> tuple[str, str | None]:
    """Split `text` at the first character that is in `chars`, and return the text before and after it.

    The text after the character is None if `text` has no such character.
    """
    at = next((at for at, char in enumerate(text) if char in chars), None)
    return (text, None) if at is None else (text[:at], text[at + 1 :])


def is_good_name(name: str) -> bool:
    """Return True if a name is a C identifier of Latin-1 letters.

    Mirrors: kernel/trace/trace_probe.h (v6.1).
    """
    return _NAME.fullmatch(name) is not None


def is_good_system_name(name: str) -> bool:
    """Return True if a name is a valid group name, which may contain dashes.

    Mirrors: kernel/trace/trace.h:is_good_system_name (v6.1).
    """
    return _SYSTEM_NAME.fullmatch(name) is not None
