"""Bytes as text: how commands are read, which names are good, and how raw bytes leave in a str.

Commands are parsed as Latin-1, one character a byte, so that columns are byte columns and no input
is undecodable. Text for readers of a file is UTF-8 with surrogate escapes: encode it the same way.
"""

from __future__ import annotations

SPACES = "\t\n\v\f\r \xa0"
"""Linux: 0xa0 counts as space, 0x1c-0x1f and 0x85 don't. Mirrors: include/linux/ctype.h:isspace (v6.1)."""


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
    words = command
    for space in SPACES:
        words = words.replace(space, " ")
    return [word for word in words.split(" ") if word]


def is_alpha(char: str) -> bool:
    """Mirrors: include/linux/ctype.h:isalpha (v6.1); its table is Latin-1."""
    if char.isascii():
        return char.isalpha()
    return char >= "\xc0" and char not in "\xd7\xf7"


def is_alnum(char: str) -> bool:
    """Mirrors: include/linux/ctype.h:isalnum (v6.1)."""
    return is_alpha(char) or "0" <= char <= "9"


def is_good_name(name: str, extra: str = "_") -> bool:
    """Whether it is a C identifier; `extra` are the further characters allowed after the first.

    Mirrors: kernel/trace/trace_probe.h:is_good_name (v6.1).
    """
    if not name or not (is_alpha(name[0]) or name[0] == "_"):
        return False
    return all(is_alnum(c) or c in extra for c in name[1:])


def is_good_system_name(name: str) -> bool:
    """Groups may contain dashes. Mirrors: kernel/trace/trace.h:is_good_system_name (v6.1)."""
    return is_good_name(name, "_-")
