"""Count of answers that agree or differ, and the listed deviations, which do not count as differences."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

LISTED = (
    ("", r"[.](percent|graph)", "Invalid field modifier"),
    ("", r"[$]arg0\b", "No BTF entry|This variable is not found"),
    ("", r"[$]arg[*]", r"(?s)BTF is not available.*: error: "),
    (r"5[.]10[.]", r"^p\S* ([+]8|0)\b", "Failed to register probe event"),
    (r"5[.]10[.]", r"^-:\S+/ ", "^$"),
    (r"6[.]1[.]", r"trace[(]asked_chain,pid,stack[)]", "^$"),
    (r"6[.]1[6-9][.]", r"^e.*[$]", r"event_probe: error: Invalid [$]-variable"),
    (r"6[.]1[6-9][.]|7[.][01][.]", r"[.]stacktrace|STACKTRACE|=stack", ""),
)
"""Deviations on the compatibility page: patterns of (release, question, Linux's answer)."""


@dataclass
class Tally:
    """The number of questions, the number of questions that Linux refuses, and descriptions of the answers
    that differ.
    """

    compared: int = 0
    refused: int = 0
    """Number of questions that Linux refuses."""
    differences: list[str] = field(default_factory=list)

    def add(self, what: str, linux: object, ours: object, *, is_refused: bool) -> None:
        """Count one question, and keep the two answers if they differ.

        `what`: text of the question. `is_refused`: whether Linux refuses the question.
        """
        self.compared += 1
        self.refused += is_refused
        if linux != ours:
            self.differences.append(f"{what}\n  Linux {linux!r:.300}\n  ours  {ours!r:.300}")


def is_listed(release: str, question: str, log: str) -> bool:
    """Return True if Linux's answer `log` to a question is one of the listed deviations."""
    return any(
        re.match(releases, release) and re.search(asked, question) and re.search(answer, log)
        for releases, asked, answer in LISTED
    )
