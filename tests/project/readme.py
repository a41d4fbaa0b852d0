"""README's examples as data: fenced blocks, commands with the output shown, and how outputs compare."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from emulated_kernel.image.kallsyms import Kallsyms

README = Path(__file__).resolve().parents[2] / "README.md"

_FENCE = re.compile(r"^```(?P<info>[^\n`]+)\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL)

_VARYING = (
    (re.compile(r"\b(0x)?[0-9a-f]{16}\b"), "ADDRESS"),
    (re.compile(r"\+0x0/0x[0-9a-f]+"), "+0x0/SIZE"),
    (re.compile(r"\b\d+\.\d{6}:"), "TIME:"),
    (re.compile(r"(?m)^ *(\S+)-\d+ +\[\d{3}\] \S+ +"), r"\1-PID [CPU] FLAGS "),
    (re.compile(r"(?m)^bash: line \d+: "), "bash: "),
    (re.compile(r"(?m)[ ]+$"), ""),
)
"""Patterns of text that differs between runs, machines or shells, and the replacements."""


@dataclass(frozen=True)
class Step:
    """One `$ command` and the text that README shows below it."""

    command: str
    output: str


def blocks(info: str, document: Path = README) -> list[str]:
    """Return the bodies of a document's blocks that are fenced with exactly this info string."""
    return [match["body"] for match in _FENCE.finditer(document.read_text()) if match["info"] == info]


def of_image(text: str, symbols: Kallsyms) -> str:
    """Return `text` with the addresses and sizes of functions replaced by their values in the kernel with
    `symbols`.
    """

    def addressed(match: re.Match[str]) -> str:
        address = symbols.lookup_name(match["name"])
        return match[0] if address is None else f"{address:016x}{match['between']}{match['name']}"

    def sized(match: re.Match[str]) -> str:
        found = symbols.by_name(match["name"])
        return f"{match['name']}+{match['offset']}/{found[0].size:#x}" if found else match[0]

    text = re.sub(r"\bffffffff[0-9a-f]{8}(?P<between>  [kr]  | [tT] )(?P<name>\w+)", addressed, text)
    return re.sub(r"\b(?P<name>\w+)\+(?P<offset>0x[0-9a-f]+)/0x[0-9a-f]+", sized, text)


def steps(body: str) -> list[Step]:
    """Return the commands of a console block; a line that begins with ">" continues the command before it."""
    parts = re.split(r"^\$ ", body, flags=re.MULTILINE)
    assert not parts[0], f"output before the first command: {parts[0]!r}"
    found = []
    for part in parts[1:]:
        command, *more = part.splitlines(keepends=True)
        while more and more[0].startswith(("> ", ">\n")):
            command += more.pop(0)[1:].removeprefix(" ")
        found.append(Step(command.rstrip("\n"), "".join(more)))
    return found


def normalise(text: str) -> str:
    """Return `text` with addresses, sizes, times, pids and script lines replaced, and lines stripped."""
    for pattern, replacement in _VARYING:
        text = pattern.sub(replacement, text)
    return text.rstrip("\n")
