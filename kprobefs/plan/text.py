"""The output of `kprobefs explain` as text, in 80 columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from textwrap import wrap

from emulated_kernel.kprobes.codegen.guest_code import BreakpointKind
from emulated_kernel.trace.interface import InterfaceRule
from kprobefs.common.terminal import lines_of
from kprobefs.measure.coverage_subject import WITH_OPTPROBES
from kprobefs.measure.verdicts import ProbeOutcome, profile_text
from kprobefs.plan.arguments import Argument
from kprobefs.plan.arrows import arrows, gutter
from kprobefs.plan.clones import calls_of_clones
from kprobefs.plan.explanation import DetourInsn, Explanation, ListedInsn
from kprobefs.plan.listing import Listing, Row, listing
from kprobefs.plan.place import place_in_any_boot
from kprobefs.plan.planned_kernel import ONLY_COUNTED, UNGUARDED

WIDTH = 80
_LANES = 4
_BYTES = 7
"""Maximum number of bytes of an instruction's code that one line shows."""
_VERDICT_WIDTH = 12
_OFFSET_WIDTH = 7
_BRACKETS = {"": " ", "only": "[", "first": "/", "inner": "|", "last": "\\"}
_LABEL_WIDTH = 11
_DETOUR_TITLE = "detour as kprobefs builds it"
_OF_LINUX = " (Linux calls optimized_callback() instead of int3)"


def as_text(explained: Explanation, *, whole: bool) -> str:
    """Return an explanation as text. `whole`: see listing()."""
    shown = listing(explained, whole=whole)
    labelled = (line for label, texts in answers(explained) for line in _labelled(label, texts))
    parts = [_head(explained), _listing(shown), labelled, _detour(explained)]
    return "\n\n".join("\n".join(lines) for lines in map(list, parts) if lines)


def _head(explained: Explanation) -> Iterator[str]:
    kernel = explained.kernel
    yield from _wrapped(f"{explained.title}: {explained.verdict.outcome.value} in {kernel.title}", "")
    yield from _wrapped(explained.prototype_text, "  ")
    # The address of a module is made up.
    module = explained.place.where.module
    place = f"at {explained.symbol.address:#x} in {explained.section}" if module is None else "in the module"
    profile = profile_text(kernel.profile.name, kernel.core)
    yield from _wrapped(f"{explained.size} bytes {place}, profile {profile}", "  ")
    if explained.place.line:
        yield from _wrapped(f"  {explained.place.line}", "  ")


# Listing


def _listing(shown: Listing) -> Iterator[str]:
    lines = gutter(arrows(shown.jumps, _LANES), len(shown.rows))
    if shown.hidden_before:
        yield _hidden(shown.hidden_before, "before")
    for row, arrow in zip(shown.rows, lines, strict=True):
        yield from _insn(row, arrow)
    if shown.hidden_after:
        yield _hidden(shown.hidden_after, "after")
    if shown.notes:
        yield ""
    for letter, text in shown.notes:
        yield from _wrapped(f"{letter:1}  {text}", "  ", "     ")


def _hidden(count: int, where: str) -> str:
    shows = "shows it" if count == 1 else "shows them"
    return f"  {count} instruction{'s' * (count != 1)} {where} (--function {shows})"


def _insn(row: Row, arrow: str) -> Iterator[str]:
    insn = row.insn
    head = f"{'*' if row.is_place else ' '}{arrow}{_BRACKETS[row.bracket]}"
    columns = WIDTH - len(head) - _OFFSET_WIDTH - 3 * _BYTES - 1 - _VERDICT_WIDTH
    texts = wrap(insn.text, columns, subsequent_indent="  ") or [""]
    codes = [insn.code[at : at + _BYTES].hex(" ") for at in range(0, len(insn.code), _BYTES)]
    verdict = f"{insn.mode} {row.note}".rstrip()
    offset = f"{f'+{insn.offset:#x}':>{_OFFSET_WIDTH - 1}} "
    for number in range(max(len(texts), len(codes))):
        code = codes[number] if number < len(codes) else ""
        text = texts[number] if number < len(texts) else ""
        line = f"{head}{offset}{code:<{3 * _BYTES}}{text:<{columns}} {verdict}"
        yield line.rstrip()
        head = f" {_continued(arrow)}{'|' if row.bracket in ('first', 'inner') else ' '}"
        offset = " " * _OFFSET_WIDTH
        verdict = ""


def _continued(arrow: str) -> str:
    """Return the arrow column of an instruction's second and later lines. `arrow` is that of its first line.

    Arrows that continue downwards become `|`; all other characters become blanks.
    """
    return "".join("|" if character in "|,+" else " " for character in arrow)


# Answers


def answers(explained: Explanation) -> Iterator[tuple[str, list[str]]]:
    """Yield the answers about the explained address, each as a label and the text lines that follow it."""
    yield "verdict", [*_verdict(explained)]
    if explained.detoured:
        places = ", ".join(f"+{insn.offset:#x}" for insn in explained.detoured)
        why = "the verdicts on this function may differ without it; take the dump while no probe is armed"
        yield "probed", [f"the dump has the jump of a kprobe at {places}: {why}"]
    if explained.verdict.outcome is not ProbeOutcome.REFUSED:
        yield "hit", [_hit(explained)]
    if explained.verdict.outcome is ProbeOutcome.BREAKPOINT and not explained.kernel.records_breakpoints:
        yield "records", [ONLY_COUNTED]
    if explained.is_unguarded:
        yield "ftrace", [UNGUARDED]
    if explained.extended is not None:
        yield "extended", [*_extended(explained)]
    yield "jumps", [*_jumps(explained)]
    if explained.verdict.outcome is not ProbeOutcome.OPTIMIZED:
        yield "nearest", [*_nearest(explained)]
    if explained.arguments:
        yield "arguments", [_argument(argument) for argument in explained.arguments]
    elif explained.unknown_arguments and explained.verdict.outcome is not ProbeOutcome.REFUSED:
        yield "arguments", [f"unknown: {explained.unknown_arguments}"]
    if explained.clones:
        yield "calls", [f"not all: {calls_of_clones(explained.symbol.name, explained.clones)}"]
    if explained.never_returns:
        yield "returns", ["never, on no path: a return probe is never hit"]
    if (passed := explained.place.passed) is not None:
        where = explained.place.where
        yield "place", [f"outside of {passed.name}, which has {passed.size} bytes: {where}"]
    if explained.place.others:
        symbols = (explained.symbol, *explained.place.others)
        kallsyms = explained.kernel.tables.kallsyms
        known = ", ".join(place_in_any_boot(each.address, kallsyms) for each in symbols)
        counts = InterfaceRule.SYMBOLS_COUNTED in explained.kernel.interface
        what = "the kernel refuses it" if counts else "the kernel probes only the first of them"
        yield "name", [f"not unique, it is at {known}: {what}; give one of these places"]


def _verdict(explained: Explanation) -> Iterator[str]:
    because = f": {explained.reason}" if explained.reason else ""
    inside = explained.containing
    if inside is not None:
        because += f", inside {inside.text} at +{inside.offset:#x}"
    yield f"{explained.verdict.outcome.value}{because}"
    if explained.is_moved:
        yield f"Linux puts the probe at +{explained.probed.offset:#x}, after the landing pad"
    answered: dict[tuple[ProbeOutcome, str], list[str]] = {}
    for other in explained.others:
        answered.setdefault((other.outcome, other.reason), []).append(other.returns)
    if [*answered] == [(explained.verdict.outcome, explained.reason)]:
        answered.clear()
        yield "for any CPU, however boot writes the returns"
    else:
        yield f"for {explained.kernel.cpu_description}"
    yield from explained.kernel.remarks
    for (outcome, reason), returns in answered.items():
        because = f": {reason}" if reason else ""
        yield f"with {', or '.join(returns)}: {outcome.value}{because}"


_HITS = {
    BreakpointKind.STEPPED: "stepped: two traps, one before and one after the instruction's copy",
    BreakpointKind.BOOSTED: "boosted: one trap, and a jump back after the instruction's copy",
    BreakpointKind.EMULATED: "emulated: one trap, whose handler does the instruction's work",
}


def _hit(explained: Explanation) -> str:
    """Return a text about a hit: the way to the handler, and how the probed instruction is executed."""
    kind = explained.breakpoint_kind
    if kind is None:
        return "ftrace: a call from the function's entry, no trap"
    if explained.verdict.outcome is ProbeOutcome.OPTIMIZED:
        return f"a jump, no trap; {kind.value} while the jump is not written"
    return _HITS[kind]


def _extended(explained: Explanation) -> Iterator[str]:
    """Yield the line about the verdict under the optimization policy of option --strategy."""
    verdict = explained.extended
    assert verdict is not None
    because = f": {explained.extended_reason}" if explained.extended_reason else ", as by the profile's rule"
    yield f"{verdict.outcome.value}{because}"


def _jumps(explained: Explanation) -> Iterator[str]:
    kernel = explained.kernel
    if kernel.has_own_kprobes:
        yield f"never: no release of Linux has jumps on {kernel.arch}"
        return
    if not kernel.profile.optimizer:
        yield f"never: the kernel of profile {kernel.profile.name} has no jump optimization"
        return
    own = "" if kernel.arch in WITH_OPTPROBES else f"no release of Linux has jumps on {kernel.arch}"
    built = {True: "CONFIG_OPTPROBES is set", False: "never: built without CONFIG_OPTPROBES", None: own}
    allowed = {
        True: "sysctl debug.kprobes-optimization is 1",
        False: "now off: sysctl debug.kprobes-optimization is 0",
        None: "allowed unless sysctl debug.kprobes-optimization is 0",
    }
    has = kernel.has_optprobes
    yield "; ".join(
        each for each in (built[has], "" if has is False else allowed[kernel.allows_jumps]) if each
    )


def _nearest(explained: Explanation) -> Iterator[str]:
    before = explained.better_before
    after = explained.better_after
    kind = "optimized"
    if before is None and after is None:
        yield "no place of this function is optimized"
        if explained.verdict.outcome is ProbeOutcome.REFUSED:
            kind = "accepted"
            before, after = explained.accepted_around
    if before is not None:
        yield f"{kind} before: {_better(explained, before)}"
    if after is not None:
        yield f"{kind} after:  {_better(explained, after)}"


def _better(explained: Explanation, insn: ListedInsn) -> str:
    return f"{explained.symbol.name}+{insn.offset:#x}  {insn.text}"


def _argument(argument: Argument) -> str:
    name = f" {argument.name}" if argument.name else ""
    kind = f" ({argument.type})" if argument.type else ""
    return f"{argument.number}{name}{kind}: {' or '.join(argument.fetches) or argument.remark}"


def _labelled(label: str, texts: Iterable[str]) -> Iterator[str]:
    for text in texts:
        indent = " " * _LABEL_WIDTH
        yield from lines_of(text, WIDTH, f"{indent}  ", f"{label:<{_LABEL_WIDTH}}")
        label = ""


# Detour


def detour_title(explained: Explanation) -> str:
    """Return the heading of the detour. On x86, the heading names the function that Linux calls at a hit."""
    is_linux = explained.kernel.arch in WITH_OPTPROBES
    return _DETOUR_TITLE + (_OF_LINUX if is_linux else "")


def relocated(insn: DetourInsn) -> str:
    """Return the mark of a copied instruction that differs from its original; "" for other instructions."""
    return "  (relocated)" if insn.is_relocated else ""


def _detour(explained: Explanation) -> Iterator[str]:
    insns = explained.detour
    if not insns:
        return
    yield from _wrapped(detour_title(explained), "")
    for part, group in groupby(insns, key=lambda insn: insn.part):
        members = list(group)
        yield f"  +{members[0].offset:#x} {part}"
        if part in ("copied instructions", "jump back"):
            for insn in members:
                yield from _wrapped(f"{insn.text}{relocated(insn)}", "    ")
        else:
            yield from _wrapped("; ".join(insn.text for insn in members), "    ")


def _wrapped(text: str, indent: str, further: str | None = None) -> list[str]:
    return lines_of(text, WIDTH, f"{indent}  " if further is None else further, indent)
