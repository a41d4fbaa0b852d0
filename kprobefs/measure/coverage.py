"""`kprobefs coverage`: how many instructions of a kernel can be probed or optimized, and reasons if not."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.arch.analysis.tactic import Tactic, Tactics
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.kprobes.profile import profile_named, with_strategy
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field
from kprobefs.common.errors import CliError, ExitStatus
from kprobefs.common.progress import Progress
from kprobefs.common.terminal import wrap
from kprobefs.measure import coverage_subject
from kprobefs.measure.coverage_subject import Subject
from kprobefs.measure.verdicts import Judge, ProbeOutcome, default_profile, outcome_of

Reasons = Counter[RejectReason | Tactics | None]
"""Reason why a probe is not optimized, tactics of a jump, or None for Linux's rule -> number of instructions.

None counts the jumps that Linux's rule allows.
"""


@dataclass
class Coverage:
    """Result of `coverage` for one subject."""

    subject: Subject
    profile: str
    symbols: list[tuple[Symbol, Reasons]] = field(default_factory=list)
    """Functions of the subject, with their counts of instructions by reason."""
    pairs: int | None = None
    """Number of instructions that the authors of a policy count as optimizable; None except on RISC-V."""
    seconds: float = 0.0
    """CPU time of the analysis in seconds."""

    @property
    def total(self) -> Reasons:
        return _sum(reasons for _, reasons in self.symbols)

    @cached_property
    def tactics(self) -> Counter[Tactic]:
        """Tactic -> number of instructions whose jump needs it, perhaps together with others."""
        found: Counter[Tactic] = Counter()
        for reason, number in self.total.items():
            if isinstance(reason, tuple):
                found.update(dict.fromkeys(reason, number))
        return found

    @property
    def sections(self) -> dict[str, Reasons]:
        """Section of the text -> counts of its functions, the largest section first."""
        found: dict[str, Reasons] = {}
        for symbol, reasons in self.symbols:
            found.setdefault(self.subject.section(symbol.address), Counter()).update(reasons)
        return dict(sorted(found.items(), key=lambda item: -item[1].total()))


def coverage(subject: Subject, profile_name: str | None, strategy: str | None = None) -> Coverage:
    """Count the instructions of all functions of a subject, with a profile and an optimization policy.

    Raises: CliError (the profile is unknown, or has no optimizer).
    """
    name = profile_name or default_profile(subject.arch)
    try:
        judge = Judge(subject, with_strategy(profile_named(name), strategy))
    except KernelError as error:
        raise CliError(str(error.strerror), ExitStatus.USAGE) from error
    found = Coverage(subject, judge.profile.title)
    counts_pairs = bool(judge.strategy and judge.strategy.pairs)
    pairs = 0
    started = time.process_time()
    progress = Progress(subject.title, sum(symbol.size for symbol in subject.symbols))
    with _without_garbage_collection():
        for symbol in subject.symbols:
            found.symbols.append((symbol, Counter(judge.reasons(symbol))))
            if counts_pairs:
                pairs += judge.checker.pairs(symbol) or 0
            progress.add(symbol.size)
    progress.end()
    found.seconds = time.process_time() - started
    found.pairs = pairs if counts_pairs else None
    return found


@contextmanager
def _without_garbage_collection() -> Iterator[None]:
    """Stop Python's garbage collection in a context: it would take a quarter of the time and find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        # Count all new objects as old ones. Otherwise the next collection would examine all of them.
        gc.freeze()
        gc.unfreeze()
        if was_on:
            gc.enable()


def subjects(
    arch: str | None, image: str | None, functions: str | None, cpu: str | None = None
) -> Iterator[Subject]:
    """Yield the subjects that the command's options name. Raises: CliError."""
    if cpu is not None and image is None:
        why = "only possible with a distribution's kernel; add --image, or leave it out"
        raise CliError(f"--cpu: {why}", ExitStatus.USAGE)
    try:
        if image is not None and cpu is not None:
            yield coverage_subject.booted_image(image, cpu)
        elif image is not None:
            yield from coverage_subject.linux_image(image)
        elif functions is not None:
            yield coverage_subject.recorded_functions(Path(functions))
        else:
            yield coverage_subject.own_image(arch or "x86_64")
    except OSError as error:
        raise CliError(
            f"{image or functions or arch}: {error.strerror or error}", ExitStatus.USAGE
        ) from error


def run(
    arch: str | None,
    image: str | None,
    functions: str | None,
    profile: str | None,
    strategy: str | None,
    *,
    cpu: str | None = None,
    as_json: bool,
) -> None:
    """Run `kprobefs coverage`: print tables, or all counts as JSON. Raises: CliError."""
    if strategy is not None and functions is not None:
        why = "a recording lacks the kernel's data, which may lead into replaced bytes; leave it out"
        raise CliError(f"--strategy: {why}", ExitStatus.USAGE)
    found = [coverage(subject, profile, strategy) for subject in subjects(arch, image, functions, cpu)]
    if as_json:
        print(json.dumps([_as_dict(each) for each in found]))
    else:
        print("\n\n".join("\n".join(_tables(each)) for each in found))


# JSON


def _as_dict(found: Coverage) -> dict[str, Any]:
    total = found.total
    return {
        "subject": found.subject.title,
        "arch": found.subject.arch,
        "profile": found.profile,
        "remarks": list(found.subject.remarks),
        "functions": len(found.symbols),
        "verdicts": _by_verdict(total),
        "reasons": [
            {"verdict": outcome_of(reason).value, "reason": reason.value, "instructions": number}
            for reason, number in total.most_common()
            if isinstance(reason, RejectReason)
        ],
        "tactics": {tactic.name.lower(): number for tactic, number in found.tactics.most_common()},
        "sections": {name: _by_verdict(reasons) for name, reasons in found.sections.items()},
        "symbols": [
            {
                "name": symbol.name,
                "address": f"{symbol.address:#x}",
                "verdicts": _by_verdict(reasons),
                "reasons": {
                    reason.value: number
                    for reason, number in reasons.most_common()
                    if isinstance(reason, RejectReason)
                },
            }
            for symbol, reasons in found.symbols
        ],
        "pairs": found.pairs,
        "seconds": round(found.seconds, 3),
    }


def _by_verdict(reasons: Reasons) -> dict[str, int]:
    found = dict.fromkeys((verdict.value for verdict in ProbeOutcome), 0)
    for reason, number in reasons.items():
        found[outcome_of(reason).value] += number
    return {"instructions": reasons.total(), **found}


# Text


def _tables(found: Coverage) -> Iterator[str]:
    total = found.total
    counted = total.total()
    rate = counted / found.seconds if found.seconds else 0
    title = found.subject.title
    arch = found.subject.arch
    yield f"{title}{'' if title.endswith(arch) else f' ({arch})'}, profile {found.profile}"
    yield f"{counted:,} instructions of {len(found.symbols):,} functions; {rate:,.0f} a second of CPU time"
    for remark in found.subject.remarks:
        yield wrap(remark, sys.stdout, "  ")
    yield ""
    verdicts = _by_verdict(total)
    registered = counted - verdicts[ProbeOutcome.REFUSED.value]
    yield f"{'verdict':<12}{'instructions':>13}{'of all':>9}{'of what registers':>19}"
    for verdict in ProbeOutcome:
        number = verdicts[verdict.value]
        of_registered = _share(number, registered) if verdict is not ProbeOutcome.REFUSED else ""
        yield f"{verdict.value:<12}{number:>13,}{_share(number, counted):>9}{of_registered:>19}"
    if found.pairs is not None:
        yield f"{'pairs':<12}{found.pairs:>13,}{_share(found.pairs, counted):>9}"
    yield ""
    yield f"{'verdict':<12}{'instructions':>13}{'of all':>9}  reason"
    for reason, number in total.most_common():
        if isinstance(reason, RejectReason):
            head = f"{outcome_of(reason).value:<12}{number:>13,}{_share(number, counted):>9}  "
            yield wrap(f"{head}{reason.value}", sys.stdout, " " * len(head))
    if found.tactics:
        yield ""
        yield f"{'tactic':<25}{'jumps':>9}  optimized only with it, perhaps with others too"
        for tactic, number in found.tactics.most_common():
            head = f"{tactic.name.lower():<20}{number:>14,}  "
            yield wrap(f"{head}{tactic.value}", sys.stdout, " " * len(head))
    yield ""
    width = max(len(name) for name in (*found.sections, "section"))
    yield f"{'section':<{width}}{'instructions':>14}" + "".join(
        f"{verdict.value:>12}" for verdict in ProbeOutcome
    )
    for name, reasons in found.sections.items():
        parts = _by_verdict(reasons)
        shares = "".join(
            f"{_share(parts[verdict.value], parts['instructions']):>12}" for verdict in ProbeOutcome
        )
        yield f"{name:<{width}}{parts['instructions']:>14,}{shares}"


def _share(number: int, of: int) -> str:
    return f"{100 * number / of:.1f} %" if of else "-"


def _sum(parts: Iterable[Reasons]) -> Reasons:
    total: Reasons = Counter()
    for part in parts:
        total.update(part)
    return total
