"""`kprobefs check`: lints files of probe definitions for one or several kernels, as text, JSON or SARIF."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from textwrap import wrap
from typing import Any

from emulated_kernel.kprobes.codegen.guest_code import BreakpointKind
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.safe_read import read_named
from emulated_kernel.util.similar_names import similar_names, similar_names_hint
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal
from kprobefs.common.production_cpus import images_and_cpus
from kprobefs.common.terminal import lines_of
from kprobefs.definitions.syntax import SETTING, Line, read_lines
from kprobefs.measure.verdicts import ProbeOutcome, profile_text
from kprobefs.mount_options import KPROBES
from kprobefs.plan.answer import PENDING, UNCHECKED, WARNINGS, Answer, Finding
from kprobefs.plan.check import check_lines
from kprobefs.plan.differences import warn_of_differences
from kprobefs.plan.planned_kernel import PlannedKernel, planned_kernel
from kprobefs.plan.sarif import sarif_log

_LIMIT = 16 << 20
"""Maximum size of a file of definitions in bytes."""
_WIDTH = 80
_NUMBER_WIDTH = 6
_OUTCOME_WIDTH = 13
"""Minimum width in characters of a kernel's column in the table of outcomes."""
_CUT = "..."
_TRAPS = {
    BreakpointKind.STEPPED: "two traps",
    BreakpointKind.BOOSTED: "one trap",
    BreakpointKind.EMULATED: "one trap",
}
"""Kind of a breakpoint -> text that says how many traps a hit takes."""
_MAX_SHOWN = 1024
"""Maximum number of characters of a definition in the table."""


@dataclass(frozen=True, slots=True)
class CheckedFile:
    """A file of probe definitions, and the answers of each kernel to its lines."""

    path: str
    text: str
    settings: int
    """Number of lines with a setting (`FILE = VALUE`) instead of a definition; they are checked in part."""
    answers: tuple[tuple[PlannedKernel, tuple[Answer, ...]], ...]


def run(
    paths: Sequence[str],
    *,
    arch: str | None,
    images: Sequence[str],
    vmcore: str | None,
    profile: str | None,
    cpus: Sequence[str],
    strategy: str | None,
    form: str,
    kprobes: str = KPROBES[0],
    allowed: Sequence[str] = (),
    strict: bool = False,
) -> bool:
    """Check the files `paths` for `kprobefs check`; return True if no kernel refuses a line.

    `allowed`: rules whose warnings are left out. `strict`: return False if there is a warning, too. `form`:
    text, json or sarif. The other arguments are the command's options, which select the kernels. Each kernel
    for x86-64 is checked for each of `cpus`.
    Raises: CliError (a file can't be read; no such kernel, profile or rule).
    """
    for rule in allowed:
        if rule not in WARNINGS:
            hint = similar_names_hint(similar_names(rule, WARNINGS)) or "; kprobefs(1) lists them"
            raise CliError(f"--allow: no warning has the rule {rule}{hint}", ExitStatus.USAGE)
    machines = images_and_cpus(images, cpus) if images else product((None,), cpus or (None,))
    kernels = [
        planned_kernel(arch, image, vmcore, profile, strategy, cpu, kprobes) for image, cpu in machines
    ]
    texts = {path: _read(path) for path in paths}
    found = []
    for path, text in texts.items():
        lines = list(read_lines(path, text))
        settings = sum(map(_is_setting, lines))
        answers = tuple((each, _checked(each, lines)) for each in kernels)
        warn_of_differences(answers)
        for answer in (answer for _, those in answers for answer in those):
            answer.findings = [each for each in answer.findings if each.is_error or each.rule not in allowed]
        found.append(CheckedFile(path, text, settings, answers))
    if form == "json":
        print(json.dumps([_as_dict(each) for each in found], indent=1))
    elif form == "sarif":
        print(json.dumps(sarif_log(result for each in found for result in _results(each)), indent=1))
    else:
        print("\n\n".join("\n".join(_text(each)) for each in found))
    every = [answer for each in found for _, answers in each.answers for answer in answers]
    return not any(answer.is_error or (strict and answer.findings) for answer in every)


def _checked(kernel: PlannedKernel, lines: Sequence[Line]) -> tuple[Answer, ...]:
    return tuple(check_lines(kernel, lines))


def _read(path: str) -> str:
    try:
        if path == "-":
            return sys.stdin.buffer.read(_LIMIT).decode("utf-8", "surrogateescape")
        return read_named(Path(path), _LIMIT).decode("utf-8", "surrogateescape")
    except OSError as error:
        raise CliError(f"{path}: {error.strerror or error}", ExitStatus.USAGE) from error


def _findings(answers: Sequence[Answer]) -> Iterator[tuple[Line, Finding]]:
    return ((answer.line, finding) for answer in answers for finding in answer.findings)


def _place(text: str, line: Line, finding: Finding) -> tuple[int, int | None]:
    """Return (line, column) of a finding in its file, both from 1 on.

    The column is None if the finding is about the whole line, or if the line is continued on the next one.
    """
    raw = text.replace("\r\n", "\n").split("\n")[line.number - 1]
    start = raw.find(line.text)
    if start < 0 or finding.column is None:
        return line.number, None
    return line.number, start + finding.column + 1


def _results(checked: CheckedFile) -> Iterator[tuple[str, str, Finding, tuple[int, int | None]]]:
    """Yield (path, kernel's name, finding, (line, column) of the finding) for each finding; see sarif_log().

    For line and column, see _place(). A finding that holds for a kernel on all CPUs is yielded once, with the
    kernel's name. For other findings, the CPUs are added to the name.
    """
    cpus: dict[str, list[str]] = {}
    found: dict[tuple[str, str, Finding, tuple[int, int | None]], list[str]] = {}
    for kernel, answers in checked.answers:
        cpus.setdefault(kernel.title, []).append(kernel.cpu_description)
        for line, finding in _findings(answers):
            result = line.file, kernel.title, finding, _place(checked.text, line, finding)
            found.setdefault(result, []).append(kernel.cpu_description)
    for (file, title, finding, place), those in found.items():
        which = "" if {*those} == {*cpus[title]} else f", for {', '.join(dict.fromkeys(those))}"
        yield file, f"{title}{which}", finding, place


# Text


def _text(checked: CheckedFile) -> Iterator[str]:
    kernels = [kernel for kernel, _ in checked.answers]
    for number, kernel in enumerate(kernels, 1):
        yield from lines_of(
            f"{number}  {escape_for_terminal(kernel.title)}, for {kernel.cpu_description}; profile "
            f"{profile_text(kernel.profile.name, kernel.core)}{_missing(kernel)}",
            _WIDTH,
            "   ",
        )
        for remark in kernel.remarks:
            yield from lines_of(escape_for_terminal(remark), _WIDTH, "   ", "   ")
    yield ""
    rows = list(zip(*(answers for _, answers in checked.answers), strict=True))
    yield from _table(len(kernels), rows)
    for row in rows:
        yield from _details(checked.path, row)
    errors = [finding.is_error for _, answers in checked.answers for _, finding in _findings(answers)]
    yield ""
    unchecked = sum(
        any(answer.outcome == UNCHECKED for answer in row) for row in rows if _is_setting(row[0].line)
    )
    skipped = f"; {_counted(unchecked, 'value')} of settings not checked" if unchecked else ""
    where = f" in {len(kernels)} kernels" if len(kernels) > 1 else ""
    yield f"{_counted(sum(errors), 'error')}, {_counted(errors.count(False), 'warning')}{where}{skipped}"


def _table(kernels: int, rows: Sequence[Sequence[Answer]]) -> Iterator[str]:
    """Yield the lines of the table of outcomes, with a column for each of `kernels` kernels.

    `rows`: for each definition, the answers of all kernels. Each definition is printed to the right of its
    outcomes. If any word would not fit there, all definitions are printed below their outcomes.
    """
    longest = max((len(answer.outcome) + 1 for row in rows for answer in row), default=0)
    width = max(_OUTCOME_WIDTH, longest)
    indent = _NUMBER_WIDTH + width * kernels
    shown = [_shown(row[0].line.text) for row in rows]
    is_below = any(indent + len(word) > _WIDTH for text in shown for word in text.split())
    if is_below:
        indent = _NUMBER_WIDTH
    columns = "".join(f"{number:<{width}}" for number in range(1, kernels + 1))
    yield f"{'line':<{_NUMBER_WIDTH}}{columns}{'' if is_below else 'definition'}".rstrip()
    for row, text in zip(rows, shown, strict=True):
        outcomes = "".join(f"{answer.outcome:<{width}}" for answer in row)
        parts = wrap(text, _WIDTH - indent, break_on_hyphens=False)
        first = "" if is_below else parts.pop(0)
        yield f"{row[0].line.number:<{_NUMBER_WIDTH}}{outcomes}{first}".rstrip()
        for part in parts:
            yield f"{' ' * indent}{part}"


def _is_setting(line: Line) -> bool:
    return SETTING.match(line.text) is not None


def _shown(definition: str) -> str:
    """Return a definition for the table, escaped for a terminal and cut after _MAX_SHOWN characters."""
    size = len(definition)
    text = escape_for_terminal(definition[:_MAX_SHOWN])
    return f"{text}... ({size:,} characters)" if size > _MAX_SHOWN else text


def _missing(kernel: PlannedKernel) -> str:
    return "" if kernel.btf else "; it has no BTF, so types are not compared"


def _details(path: str, row: Sequence[Answer]) -> Iterator[str]:
    """Yield the output about the answers in `row`, one for each kernel: findings, and reasons for no jump.

    `path`: path of the file. A finding that holds for several kernels is printed once, with the kernels'
    numbers.
    """
    line = row[0].line
    kernels: dict[tuple[str, int | None], list[str]] = {}
    for number, answer in enumerate(row, 1):
        for told in _messages(answer):
            kernels.setdefault(told, []).append(str(number))
    text = escape_for_terminal(line.text)
    for (message, column), numbers in kernels.items():
        which = "" if len(row) == 1 else f" ({'all' if len(numbers) == len(row) else ', '.join(numbers)})"
        shown = escape_for_terminal(f"{path}:{line.number}{which}: {message}")
        yield ""
        yield from lines_of(shown, _WIDTH, "  ")
        if column is not None and text == line.text:
            part, at = _around(text, column, _WIDTH - 2)
            yield f"  {part}"
            yield f"  {' ' * at}^"


def _around(text: str, column: int, width: int) -> tuple[str, int]:
    """Return at most `width` characters of a line around a column, and the column within this part."""
    if len(text) <= width:
        return text, column
    size = width - 2 * len(_CUT)
    start = max(0, min(column - size // 2, len(text) - size))
    before = _CUT if start else ""
    after = _CUT if start + size < len(text) else ""
    return f"{before}{text[start : start + size]}{after}", column - start + len(before)


def _messages(answer: Answer) -> Iterator[tuple[str, int | None]]:
    """Yield (message, column) of each finding, and then of messages that explain the outcome, if needed.

    The column is None if a message is about the whole line.
    """
    for each in answer.findings:
        yield f"{'error' if each.is_error else 'warning'}: {each.message} [{each.rule}]", each.column
    is_repeated = any(finding.message == answer.reason for finding in answer.findings)
    reason = "" if is_repeated else f": {answer.reason}"
    if answer.outcome == ProbeOutcome.BREAKPOINT.value:
        traps = _TRAPS[BreakpointKind(answer.breakpoint_kind)]
        traps += ", and one at the return" * answer.traps_at_return
        yield f"{answer.outcome}, {answer.breakpoint_kind} ({traps}){reason}", None
    elif answer.outcome == PENDING:
        yield f"{answer.outcome}{reason}", None
    is_told = any(finding.rule == "needs-module" for finding in answer.findings)
    if answer.unloaded and not is_told:
        yield f"{answer.outcome} with its module loaded; {answer.unloaded} until then", None
    if answer.extended is not None and answer.outcome == ProbeOutcome.BREAKPOINT.value:
        yield f"extended: {answer.extended}: {answer.extended_reason}", None


def _counted(number: int, word: str) -> str:
    return f"{number} {word}{'s' * (number != 1)}"


# JSON


def _as_dict(checked: CheckedFile) -> dict[str, Any]:
    return {
        "file": checked.path,
        "settings": checked.settings,
        "kernels": [
            {
                "kernel": kernel.title,
                "cpu": kernel.cpu_description,
                "remarks": list(kernel.remarks),
                "profile": kernel.profile.name,
                "btf": kernel.btf is not None,
                "lines": [_line_as_dict(checked.text, answer) for answer in answers],
            }
            for kernel, answers in checked.answers
        ],
    }


def _line_as_dict(text: str, answer: Answer) -> dict[str, Any]:
    return {
        "line": answer.line.number,
        "definition": answer.line.text,
        "outcome": answer.outcome,
        "reason": answer.reason,
        "unloaded": answer.unloaded or None,
        "breakpoint": answer.breakpoint_kind,
        "traps_at_return": answer.traps_at_return,
        "extended": None
        if answer.extended is None
        else {"outcome": answer.extended, "reason": answer.extended_reason},
        "address": f"{answer.address:#x}" if answer.address else None,
        "findings": [
            {
                "rule": finding.rule,
                "level": "error" if finding.is_error else "warning",
                "message": finding.message,
                "column": _place(text, answer.line, finding)[1],
            }
            for finding in answer.findings
        ],
    }
