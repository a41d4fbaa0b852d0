"""The disassembly that `kprobefs explain` shows: rows, and notes why probes are refused or not optimized."""

from __future__ import annotations

from collections.abc import Sequence
from string import ascii_lowercase

from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.util.fast_dataclass import dataclass
from kprobefs.measure.verdicts import ProbeOutcome
from kprobefs.plan.explanation import Explanation, ListedInsn

_AROUND = 8
"""Number of instructions shown on each side of the explained address, unless all are shown."""


@dataclass(frozen=True, slots=True)
class Row:
    """An instruction in the listing."""

    insn: ListedInsn
    is_place: bool
    bracket: str
    """Which part of the bracket around the instructions that a jump replaces is on this line.

    The value is "only", "first", "inner" or "last"; it is "" for instructions outside of the bracket.
    """
    note: str
    """Letter of the note that explains the verdict, or "" if there is no note."""


@dataclass(frozen=True, slots=True)
class Listing:
    """The rows of a disassembly, and notes why probes on its instructions are refused or not optimized."""

    rows: tuple[Row, ...]
    notes: tuple[tuple[str, str], ...]
    """(letter, text) of each line of the notes; the letter is "" if the line continues the note before."""
    hidden_before: int
    """Number of instructions of the function before the first row."""
    hidden_after: int

    @property
    def jumps(self) -> list[tuple[int, int]]:
        """Jumps between shown rows, as pairs: index of the jump's row, and index of the target's row."""
        rows = {row.insn.address: number for number, row in enumerate(self.rows)}
        return [
            (number, rows[row.insn.target])
            for number, row in enumerate(self.rows)
            if row.insn.target is not None and row.insn.target in rows
        ]


def listing(explained: Explanation, *, whole: bool) -> Listing:
    """Return the rows and the notes for an explanation.

    `whole`: True lists all instructions of the function; False lists only those around the explained address.
    """
    insns = explained.insns
    first = 0
    last = len(insns)
    if not whole:
        at = max((n for n, insn in enumerate(insns) if insn.address <= explained.address), default=0)
        first = max(at - _AROUND, 0)
        last = min(max(at + _AROUND + 1, 2 * _AROUND + 1), len(insns))
        first = max(min(first, last - 2 * _AROUND - 1), 0)
    shown = insns[first:last]
    notes = _notes(shown)
    letters = {reason: letter for reason, letter, _ in notes}
    rows = tuple(
        Row(
            insn,
            insn.address <= explained.address < insn.end,
            _bracket(insn, explained),
            letters.get(_reason(insn), "") if _reason(insn) else "",
        )
        for insn in shown
    )
    texts = tuple((letter, text) for _, letter, text in notes)
    return Listing(rows, texts, first, len(insns) - last)


def _reason(insn: ListedInsn) -> RejectReason | None:
    rejection = insn.verdict.rejection
    return None if rejection is None else rejection.reason


def _blamed(insn: ListedInsn) -> int:
    """Return the address that breaks the rule against a probe on `insn`, or against the jump of the probe.

    The verdict on `insn` must have a rejection.
    """
    assert insn.verdict.rejection is not None
    return insn.verdict.rejection.addr


def _notes(insns: Sequence[ListedInsn]) -> list[tuple[RejectReason | None, str, str]]:
    """Return the lines of the notes about `insns`, each as (reason, letter, text).

    There is one note for each reason except FTRACE. If the rule is broken at a single address, the note is
    one line, which names the address. Otherwise a line for each address follows the rule's line, with None as
    the reason and "" as the letter.
    """
    by_reason: dict[RejectReason, list[ListedInsn]] = {}
    for insn in insns:
        reason = _reason(insn)
        if reason is not None and reason is not RejectReason.FTRACE:
            by_reason.setdefault(reason, []).append(insn)
    found: list[tuple[RejectReason | None, str, str]] = []
    for (reason, each), letter in zip(by_reason.items(), ascii_lowercase, strict=False):
        first, *others = dict.fromkeys(insn.reason for insn in sorted(each, key=_blamed))
        if not others:
            found.append((reason, letter, first))
            continue
        rule = str(reason.value)
        found.append((reason, letter, rule))
        # Each text is PLACE: RULE, and an instruction or register if the rule is about one.
        found += [
            (None, "", text.replace(f" {rule}:", "").replace(f": {rule}", "")) for text in (first, *others)
        ]
    return found


def _bracket(insn: ListedInsn, explained: Explanation) -> str:
    if explained.verdict.outcome not in (ProbeOutcome.OPTIMIZED, ProbeOutcome.BREAKPOINT):
        return ""
    bracket = explained.bracket
    if insn.address not in bracket:
        return ""
    is_first = insn.address == bracket.start
    is_last = insn.end == bracket.stop
    if is_first or is_last:
        return "only" if is_first and is_last else "first" if is_first else "last"
    return "inner"
