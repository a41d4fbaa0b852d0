"""Bytes as text: how commands are read, which names are good, and how raw bytes leave in a str.

Commands are parsed as Latin-1, one character a byte, so that columns are byte columns and no input
is undecodable. Text for readers of a file is UTF-8 with surrogate escapes: encode it the same way.
"""

from __future__ import annotations

import re

SPACES = "\t\n\v\f\r \xa0"
"""Linux: 0xa0 counts as space, 0x1c-0x1f and 0x85 don't. Mirrors: include/linux/ctype.h:isspace (v6.1)."""

ALNUM = "0-9A-Za-z\xc0-\xd6\xd8-\xf6\xf8-\xff"
"""Within a regular expression's brackets. Mirrors: include/linux/ctype.h:isalnum (v6.1), of Latin-1."""
_WORD = re.compile(f"[^{SPACES}]+")
_NAME = re.compile(f"(?![0-9])[_{ALNUM}]+")
_SYSTEM_NAME = re.compile(f"(?![0-9])[-_{ALNUM}]+")


def decode_command(data: bytes) -> str:
    """A written command, one character a byte."""
    return data.decode("latin-1")


def to_text(command: str) -> str:
    """What of a command is shown to readers; bytes that aren't UTF-8 become surrogates."""
    return command if command.isascii() else bytes_to_text(command.encode("latin-1"))


def bytes_to_text(data: bytes) -> str:
    """Raw bytes for readers; bytes that aren't UTF-8 become surrogates."""
    return data.decode("utf-8", "surrogateescape")


def argv_split(command: str) -> list[str]:
    """The words of a command."""
    return _WORD.findall(command)


def split_at(text: str, chars: str = " \t") -> tuple[str, str | None]:
    """What stands before the first of these characters, and behind it; None where there is none."""
    at = next((at for at, char in enumerate(text) if char in chars), None)
    return (text, None) if at is None else (text[:at], text[at + 1 :])


def is_good_name(name: str) -> bool:
    """Whether it is a C identifier, of Latin-1 letters. Mirrors: kernel/trace/trace_probe.h (v6.1)."""
    return _NAME.fullmatch(name) is not None


def is_good_system_name(name: str) -> bool:
    """Groups may contain dashes. Mirrors: kernel/trace/trace.h:is_good_system_name (v6.1)."""
    return _SYSTEM_NAME.fullmatch(name) is not None
