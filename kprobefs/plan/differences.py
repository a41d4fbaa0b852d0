"""Warnings about lines that mean different things in several kernels: instructions, parameters, members."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from kprobefs.definitions.syntax import word_column
from kprobefs.plan.answer import Answer, Finding, Read
from kprobefs.plan.planned_kernel import PlannedKernel

_OPERAND_ADDRESS = re.compile(r"(?<=[\w.])\+0x[0-9a-f]+|\b0x[0-9a-f]{6,}\b")
"""Pattern for the part of an instruction's text that differs between builds: an offset or an address."""

_INTEGER = re.compile(r"([su])\d+")
"""Pattern for the text of an integer type in Read.kind. Its group is the sign."""

Row = Sequence[tuple[PlannedKernel, Answer]]
"""The answers of several kernels to one line."""


def warn_of_differences(checked: Sequence[tuple[PlannedKernel, Sequence[Answer]]]) -> None:
    """Add warnings to the answers to each line that does not mean the same in several kernels.

    If a value's type is narrower in some kernels, a fetch argument of the narrow size reads only a part of
    the value in the other kernels. The warnings about this are removed from the answers: no fetch type fits
    all of these kernels, and the narrow one is right as long as the value fits.

    `checked`: each kernel with its answers to the same lines. A warning is added to the answers of all
    kernels that it concerns.
    """
    kernels = [kernel for kernel, _ in checked]
    for answers in zip(*(answers for _, answers in checked), strict=True):
        row = list(zip(kernels, answers, strict=True))
        _accept_narrow(row)
        for those, finding in (*_other_insns(row), *_other_parameters(row), *_other_members(row)):
            for answer in those:
                answer.findings.append(finding)


def _other_insns(row: Row) -> Iterator[tuple[Sequence[Answer], Finding]]:
    """Yield (answers, warning) if the line's place is not the same instruction in all kernels.

    The answers are those of the kernels that the warning concerns. An offset belongs to one build of a
    kernel; in another build, the probe is elsewhere in the function.
    """
    known = [(kernel, answer) for kernel, answer in row if answer.insn]
    texts = [(kernel, _OPERAND_ADDRESS.sub("", answer.insn), answer.insn) for kernel, answer in known]
    if which := _which(texts):
        message = f"not the same instruction in all kernels: {which}"
        column = word_column(known[0][1].line.text, 1)
        yield [answer for _, answer in known], Finding("other-instruction", False, message, column)


def _accept_narrow(row: Row) -> None:
    """Remove the warnings of the rule type-size about arguments for which _is_narrow() returns True."""
    for known in _by(row, lambda read: read.arg).values():
        if _is_narrow([read for _, _, read in known]):
            for _, answer, read in known:
                answer.findings = [
                    each for each in answer.findings if each.rule != "type-size" or each.column != read.column
                ]


def _is_narrow(reads: Sequence[Read]) -> bool:
    """Return True if a value's size differs between kernels, and the argument reads the smallest size.

    `reads`: the Read of the argument in each kernel. The result is False unless all values are integers of
    one name and sign, or members of one name in the same structure.
    """
    sizes = {read.value_size for read in reads}
    if len(sizes) < 2 or {read.size for read in reads} != {min(sizes)}:
        return False
    names = {read.kind[0] for read in reads}
    if reads[0].members:
        return len({read.kind for read in reads}) == 1 and len({read.members for read in reads}) == 1
    signs = [_INTEGER.fullmatch(read.kind[1]) for read in reads]
    return len(names) == 1 and len({sign and sign[1] for sign in signs}) == 1 and None not in signs


def _other_parameters(row: Row) -> Iterator[tuple[Sequence[Answer], Finding]]:
    """Yield (answers, warning) for each parameter, or result, that the kernels declare differently.

    The answers are those of the kernels that the warning concerns. Parameters that all fetch arguments read
    in the smallest size are left out; see _is_narrow().
    """
    arguments = [[read for _, _, read in known] for known in _by(row, lambda read: read.arg).values()]
    wide = {read.base for reads in arguments if not _is_narrow(reads) for read in reads}
    for base, known in _by(row, lambda read: read.base).items():
        if base not in wide:
            continue
        if which := _which([(kernel, read.kind, read.declared) for kernel, _, read in known]):
            message = f"the kernels declare {base} differently: {which}"
            finding = Finding("other-parameter", False, message, known[0][2].column)
            yield [answer for _, answer, _ in known], finding


def _other_members(row: Row) -> Iterator[tuple[Sequence[Answer], Finding]]:
    """Yield (answers, warning) for each fetch argument whose offsets lead to other members in some kernels.

    The answers are those of the kernels that the warning concerns. A fetch argument whose parameter differs
    is left out. Members that share an offset, in a union, count as the same if one of them is in all kernels.
    """
    for known in _by(row, lambda read: read.arg).values():
        if len({read.kind for _, _, read in known}) > 1:
            continue
        for step in range(max(len(read.members) for _, _, read in known)):
            found = [each for each in known if step < len(each[2].members)]
            if frozenset.intersection(*(read.members[step] for _, _, read in found)):
                continue
            names = [(kernel, name := min(read.members[step]), name) for kernel, _, read in found]
            message = f"{found[0][2].arg} reads other members in some kernels: {_which(names)}"
            finding = Finding("other-member", False, message, found[0][2].column)
            yield [answer for _, answer, _ in found], finding
            break


def _by(row: Row, key: Callable[[Read], str]) -> dict[str, list[tuple[PlannedKernel, Answer, Read]]]:
    """Return a map key -> list with (kernel, answer, read) of each kernel that has a Read with this key.

    `key`: function that returns the key of a Read. If an answer has several Reads with the same key, the
    first one counts.
    """
    found: dict[str, list[tuple[PlannedKernel, Answer, Read]]] = {}
    for kernel, answer in row:
        first = {key(read): read for read in reversed(answer.reads)}
        for name, read in first.items():
            found.setdefault(name, []).append((kernel, answer, read))
    return found


def _which(texts: Sequence[tuple[PlannedKernel, object, str]]) -> str:
    """Return a text that lists the different values, each with its kernels; "" if all values are equal.

    Each item of `texts` is a kernel, the value to compare, and the text that shows the value.
    """
    titles: dict[object, dict[str, None]] = {}
    shown: dict[object, str] = {}
    for kernel, kind, text in texts:
        titles.setdefault(kind, {})[kernel.title] = None
        shown.setdefault(kind, text)
    if len(titles) < 2:
        return ""
    return "; ".join(f"{shown[kind]} in {', '.join(those)}" for kind, those in titles.items())
