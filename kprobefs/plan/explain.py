"""`kprobefs explain`: predicts the outcome of a probe at a place of a kernel, without running the kernel."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal
from kprobefs.common.output_file import OutputFile
from kprobefs.measure.verdicts import ProbeOutcome
from kprobefs.mount_options import KPROBES
from kprobefs.plan.explanation import Explanation, ListedInsn
from kprobefs.plan.place import find_place, module_of
from kprobefs.plan.planned_kernel import PlannedKernel, planned_kernel
from kprobefs.plan.source_lines import SourceLines, is_source_line
from kprobefs.plan.text import as_text


def run(
    places: Sequence[str],
    *,
    arch: str | None,
    image: str | None,
    vmcore: str | None,
    profile: str | None,
    cpu: str | None,
    strategy: str | None,
    whole: bool,
    as_json: bool,
    outputs: Mapping[str, str],
    debug_info: str | None = None,
    kprobes: str = KPROBES[0],
) -> list[CliError]:
    """Explain probes at `places` for `kprobefs explain`, and print the explanations.

    Return an error for each place that can't be explained.

    `whole`: True shows all instructions of each function, False those around the place. `as_json` prints JSON
    instead of text. `outputs`: form of a document (`svg`, `html` or `stages`) -> path of the file to write.
    `debug_info` is the path of a file with the kernel's debug information, for lines of source files.
    `kprobes`: whose kprobes probe the place: "kprobefs", or "kernel" for those of the kernel in `image` or
    `vmcore`. The other arguments are the command's options, which select the kernel.
    Raises: CliError (no such kernel; a file that can't be written).
    """
    if debug_info is not None and not any(map(is_source_line, places)):
        why = "only needed for places of the form FILE:LINE; leave it out"
        raise CliError(f"--debug-info: {why}", ExitStatus.USAGE)
    found: list[Explanation] = []
    errors: list[CliError] = []
    with ExitStack() as stack:
        files = {form: stack.enter_context(OutputFile(path)) for form, path in outputs.items()}
        kernel = planned_kernel(arch, image, vmcore, profile, strategy, cpu, kprobes)
        for explained in _explanations(kernel, places, debug_info):
            if isinstance(explained, Explanation):
                found.append(explained)
            else:
                errors.append(explained)
        if not found:
            return errors
        try:
            for form, file in files.items():
                file.write(_document(form, found, whole=whole).encode())
        except CliError:
            _print(found, whole=whole, as_json=as_json)
            raise
    if as_json or not outputs:
        _print(found, whole=whole, as_json=as_json)
    return errors


def _document(form: str, found: Sequence[Explanation], *, whole: bool) -> str:
    """Return the document with the explanations in the form `svg`, `html` or `stages`.

    Raises: CliError (`stages` for several places, for another kernel than kprobefs's own, or a place at which
    no jump is written).
    """
    if form == "svg":
        from kprobefs.plan.picture import picture

        return picture(found, whole=whole)
    if form == "stages":
        from kprobefs.plan.stages_picture import stages_picture

        if len(found) > 1:
            raise CliError("--stages: the picture is of one place; give one", ExitStatus.USAGE)
        return stages_picture(found[0])
    from kprobefs.plan.page import page

    return page(found, whole=whole)


def _print(found: Sequence[Explanation], *, whole: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps([as_dict(each) for each in found], indent=1))
        return
    text = "\n\n".join(as_text(each, whole=whole) for each in found)
    print("\n".join(map(escape_for_terminal, text.split("\n"))))


def _explanations(
    kernel: PlannedKernel, places: Sequence[str], debug_info: str | None
) -> Iterator[Explanation | CliError]:
    """Yield the explanations of each place, or an error for a place that can't be explained.

    A place FILE:LINE has one explanation for each function with code of the line. `debug_info`: see run().
    """
    with_modules: dict[str, PlannedKernel] = {}
    source = SourceLines(kernel, debug_info)
    for place in places:
        try:
            if is_source_line(place):
                yield from (Explanation(kernel, each) for each in source.places(place))
                continue
            module = module_of(place)
            chosen = kernel
            if module is not None:
                if module not in with_modules:
                    symbol = place.removeprefix(f"{module}:").partition("+")[0]
                    with_modules[module] = kernel.with_module_of(module, symbol)
                chosen = with_modules[module]
            yield Explanation(chosen, find_place(place, chosen.tables))
        except CliError as error:
            yield error


def as_dict(explained: Explanation) -> dict[str, Any]:
    """Return an explanation as a dictionary for JSON. Addresses are hexadecimal texts."""
    kernel = explained.kernel
    prototype = explained.prototype
    return {
        "place": explained.place.text,
        "symbol": explained.symbol.name,
        "line": explained.place.line or None,
        "module": explained.place.where.module,
        "offset": explained.probed.offset,
        "address": f"{explained.address:#x}",
        "kernel": kernel.title,
        "arch": kernel.arch,
        "profile": kernel.profile.name,
        "cpu": kernel.cpu_description,
        "remarks": list(kernel.remarks),
        "prototype": None if prototype is None else prototype.text,
        "size": explained.size,
        "section": explained.section,
        "verdict": explained.verdict.outcome.value,
        "reason": explained.reason,
        "records": explained.verdict.outcome is not ProbeOutcome.BREAKPOINT or kernel.records_breakpoints,
        "breakpoint": None if explained.breakpoint_kind is None else explained.breakpoint_kind.value,
        "patched_by_ftrace": explained.is_unguarded,
        "extended": _extended(explained),
        "optprobes": kernel.has_optprobes,
        "optimization": kernel.allows_jumps,
        "others": [
            {"returns": each.returns, "verdict": each.outcome.value, "reason": each.reason}
            for each in explained.others
        ],
        "region": [f"{explained.bracket.start:#x}", f"{explained.bracket.stop:#x}"],
        "nearest": {
            "before": _offset(explained.better_before),
            "after": _offset(explained.better_after),
        },
        "arguments": [
            {
                "number": each.number,
                "name": each.name,
                "type": each.type,
                "fetch": list(each.fetches),
                "remark": each.remark,
            }
            for each in explained.arguments
        ],
        "unknown_arguments": explained.unknown_arguments or None,
        "detoured": [insn.offset for insn in explained.detoured],
        "never_returns": explained.never_returns,
        "clones": list(explained.clones),
        "other_symbols": [f"{each.address:#x}" for each in explained.place.others],
        "instructions": [_insn(each) for each in explained.insns],
        "detour": [
            {"part": each.part, "offset": each.offset, "text": each.text, "relocated": each.is_relocated}
            for each in explained.detour
        ],
    }


def _extended(explained: Explanation) -> dict[str, Any] | None:
    verdict = explained.extended
    if verdict is None:
        return None
    tactics = () if verdict.region is None else verdict.region.tactics
    return {
        "verdict": verdict.outcome.value,
        "reason": explained.extended_reason,
        "tactics": [tactic.name.lower() for tactic in tactics],
    }


def _insn(insn: ListedInsn) -> dict[str, Any]:
    return {
        "address": f"{insn.address:#x}",
        "offset": insn.offset,
        "bytes": insn.code.hex(),
        "text": insn.text,
        "target": None if insn.target is None else f"{insn.target:#x}",
        "verdict": insn.verdict.outcome.value,
        "reason": insn.reason,
        "extended": None if insn.extended is None else insn.extended.outcome.value,
    }


def _offset(insn: ListedInsn | None) -> int | None:
    return None if insn is None else insn.offset
