"""`kprobefs coverage`: numbers of a kernel's instructions that can be probed or optimized, and reasons."""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from textwrap import fill
from typing import Any, NamedTuple

from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.arch.analysis.tactic import Tactic, Tactics
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.kprobes.profile import with_strategy
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field
from kprobefs.common.errors import CliError, ExitStatus, explained
from kprobefs.common.progress import Progress
from kprobefs.measure import coverage_subject
from kprobefs.measure.coverage_subject import Subject
from kprobefs.measure.verdicts import Judge, ProbeOutcome, chosen_profile, outcome_of

_WIDTH = 80
_PIECE = 1 << 16
"""Size in bytes of the functions that a process examines at a time."""
Reasons = Counter[RejectReason | Tactics | None]
"""Reason why a probe is not optimized, tactics of a jump, or None for Linux's rule -> number of instructions.

None counts the jumps that Linux's rule allows.
"""


@dataclass
class Coverage:
    """Result of `kprobefs coverage` for one kernel (its subject).

    For each function, it counts the instructions by the reason why a probe there is optimized or not.
    """

    judge: Judge
    profile: str
    symbols: list[tuple[Symbol, Reasons]] = field(default_factory=list)
    """Functions of the subject, with their counts of instructions by reason."""
    pairs: int | None = None
    """Number of instructions that the authors of a policy count as optimizable; None except on RISC-V."""
    seconds: float = 0.0
    """CPU time of the analysis in seconds."""

    @property
    def subject(self) -> Subject:
        """The kernel whose functions were counted."""
        return self.judge.subject

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


class Counting(NamedTuple):
    """The counts of one function of one subject."""

    reasons: Reasons
    pairs: int
    seconds: float
    """CPU time; 0 if the function has the same code in a previous subject."""


def coverage(
    group: Sequence[Subject], profile_name: str | None, strategy: str | None = None, jobs: int = 1
) -> list[Coverage]:
    """Count the instructions of all functions of subjects, with a profile and an optimization policy.

    The subjects of a group have the same functions; code that does not differ is examined once.
    `jobs`: number of processes.
    Raises: CliError (the profile is unknown, or has no optimizer; a process has ended).
    """
    first = group[0]
    try:
        profile = with_strategy(chosen_profile(profile_name, first.arch, first.tables), strategy)
        judges = [Judge(subject, profile) for subject in group]
    except KernelError as error:
        raise CliError(str(error.strerror), ExitStatus.USAGE) from error
    found = [Coverage(judge, judge.profile.title) for judge in judges]
    # Other functions may decide too, if the policy looks at references to a function.
    counter = FunctionCounter(judges, is_local=strategy is None)
    with Progress(first.title, sum(symbol.size for symbol in first.symbols)) as progress:
        for symbol, counted in zip(first.symbols, counter.count(first.symbols, jobs, progress), strict=True):
            for coverage_of, one in zip(found, counted, strict=True):
                coverage_of.symbols.append((symbol, one.reasons))
                coverage_of.seconds += one.seconds
                if counter.counts_pairs:
                    coverage_of.pairs = (coverage_of.pairs or 0) + one.pairs
    return found


class FunctionCounter:
    """Counts the instructions of functions in several kernels that have the same functions."""

    def __init__(self, judges: Sequence[Judge], *, is_local: bool) -> None:
        """Keep the judges. `is_local`: a verdict depends on the function's own code and tables only."""
        self._judges = judges
        self._is_local = is_local
        strategy = judges[0].strategy
        self.counts_pairs = bool(strategy and strategy.pairs)

    def counting(self, symbol: Symbol) -> list[Counting]:
        """Return the counts of a function in each kernel."""
        seen: dict[bytes, Counting] = {}
        found = []
        for judge in self._judges:
            code = judge.subject.tables.read(symbol.address, symbol.size) if self._is_local else b""
            known = seen.get(code) if self._is_local else None
            if known is not None:
                found.append(known._replace(seconds=0.0))
                continue
            started = time.process_time()
            reasons: Reasons = Counter(judge.reasons(symbol))
            pairs = (judge.checker.pairs(symbol) or 0) if self.counts_pairs else 0
            one = Counting(reasons, pairs, time.process_time() - started)
            seen[code] = one
            found.append(one)
        return found

    def count(
        self, symbols: Sequence[Symbol], jobs: int, progress: Progress | None = None
    ) -> Iterator[list[Counting]]:
        """Yield the counts of functions, in their order. Raises: CliError (a process has ended)."""
        pieces = list(_pieces(symbols))
        with _without_garbage_collection():
            if jobs < 2 or len(pieces) < 2:
                counted: Iterable[list[list[Counting]]] = map(self._count_piece, pieces)
            else:
                # Processes share the memory of all code that is decoded before the fork.
                self.counting(symbols[0])
                counted = self._count_in_processes(pieces, jobs)
            for piece, found in zip(pieces, counted, strict=True):
                yield from found
                if progress is not None:
                    progress.add(sum(symbol.size for symbol in piece))

    def _count_piece(self, symbols: Sequence[Symbol]) -> list[list[Counting]]:
        return [self.counting(symbol) for symbol in symbols]

    def _count_in_processes(
        self, pieces: Sequence[Sequence[Symbol]], jobs: int
    ) -> Iterator[list[list[Counting]]]:
        from concurrent.futures import ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool
        from multiprocessing import get_context

        global _forked
        _forked = self, pieces
        try:
            with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
                yield from pool.map(_count_number, range(len(pieces)))
        except BrokenProcessPool as error:
            raise CliError(
                "coverage: a process was ended from outside; run it again with --jobs 1"
            ) from error
        finally:
            _forked = None


_forked: tuple[FunctionCounter, Sequence[Sequence[Symbol]]] | None = None
"""Counter and groups of functions that FunctionCounter.count() passes to its processes.

Forked processes inherit the variable, because kernels are too large to send.
"""


def _count_number(number: int) -> list[list[Counting]]:
    assert _forked is not None
    counter, pieces = _forked
    return counter._count_piece(pieces[number])


def _pieces(symbols: Sequence[Symbol]) -> Iterator[Sequence[Symbol]]:
    """Yield successive functions in pieces of about _PIECE bytes."""
    start = 0
    size = 0
    for number, symbol in enumerate(symbols, 1):
        size += symbol.size
        if size >= _PIECE or number == len(symbols):
            yield symbols[start:number]
            start = number
            size = 0


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
    arch: str | None,
    images: Sequence[str],
    functions: str | None,
    vmcore: str | None = None,
    cpu: str | None = None,
    pattern: str | None = None,
) -> Iterator[list[Subject]]:
    """Yield groups of the kernels that the command's options name. Kernels of a group have equal functions.

    `pattern`: count only functions with such names, as in a shell. Raises: CliError.
    """
    if cpu is not None and not images:
        why = "only possible with a distribution's kernel; add --image, or leave it out"
        raise CliError(f"--cpu: {why}", ExitStatus.USAGE)
    for image in images or (None,):
        with explained(image or functions or vmcore or arch or ""):
            if image is not None and cpu is not None:
                group = [coverage_subject.booted_image(image, cpu)]
            elif image is not None:
                group = list(coverage_subject.linux_image(image))
            elif functions is not None:
                group = [coverage_subject.recorded_functions(Path(functions))]
            elif vmcore is not None:
                group = [coverage_subject.dumped_kernel(vmcore)]
            else:
                group = [coverage_subject.own_image(arch or "x86_64")]
        if pattern is not None:
            group = [subject.of_functions(pattern) for subject in group]
            if not group[0].symbols:
                raise CliError(
                    f"--function {pattern}: no such function in {group[0].title}", ExitStatus.USAGE
                )
        yield group


# JSON


def as_dict(found: Coverage) -> dict[str, Any]:
    """Return all counts of a subject for JSON."""
    total = found.total
    return {
        "subject": found.subject.title,
        "arch": found.subject.arch,
        "profile": found.profile,
        "remarks": list(found.subject.remarks),
        "functions": len(found.symbols),
        "verdicts": by_verdict(total),
        "reasons": [
            {"verdict": outcome_of(reason).value, "reason": reason.value, "instructions": number}
            for reason, number in total.most_common()
            if isinstance(reason, RejectReason)
        ],
        "tactics": {tactic.name.lower(): number for tactic, number in found.tactics.most_common()},
        "sections": {name: by_verdict(reasons) for name, reasons in found.sections.items()},
        "symbols": [
            {
                "name": symbol.name,
                "address": f"{symbol.address:#x}",
                "verdicts": by_verdict(reasons),
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


def by_verdict(reasons: Reasons) -> dict[str, int]:
    """Return name of an outcome -> number of instructions, with their sum as `instructions`."""
    found = dict.fromkeys((verdict.value for verdict in ProbeOutcome), 0)
    for reason, number in reasons.items():
        found[outcome_of(reason).value] += number
    return {"instructions": reasons.total(), **found}


# Text


def tables(found: Coverage) -> Iterator[str]:
    """Yield the lines of the tables for one kernel."""
    total = found.total
    counted = total.total()
    rate = counted / found.seconds if found.seconds else 0
    title = found.subject.title
    arch = found.subject.arch
    yield _wrapped(f"{title}{'' if title.endswith(arch) else f' ({arch})'}, profile {found.profile}", "  ")
    yield f"{counted:,} instructions of {len(found.symbols):,} functions; {rate:,.0f} a second of CPU time"
    for remark in found.subject.remarks:
        yield _wrapped(remark, "  ")
    yield ""
    verdicts = by_verdict(total)
    registered = counted - verdicts[ProbeOutcome.REFUSED.value]
    yield f"{'verdict':<12}{'instructions':>13}{'of all':>9}{'of what registers':>19}"
    for verdict in ProbeOutcome:
        number = verdicts[verdict.value]
        of_registered = share(number, registered) if verdict is not ProbeOutcome.REFUSED else ""
        yield f"{verdict.value:<12}{number:>13,}{share(number, counted):>9}{of_registered:>19}"
    if found.pairs is not None:
        yield f"{'pairs':<12}{found.pairs:>13,}{share(found.pairs, counted):>9}"
    yield ""
    yield f"{'verdict':<12}{'instructions':>13}{'of all':>9}  reason"
    for reason, number in total.most_common():
        if isinstance(reason, RejectReason):
            head = f"{outcome_of(reason).value:<12}{number:>13,}{share(number, counted):>9}  "
            yield _wrapped(f"{head}{reason.value}", " " * len(head))
    if found.tactics:
        yield ""
        yield f"{'tactic':<25}{'jumps':>9}  optimized only with it, perhaps with others too"
        for tactic, number in found.tactics.most_common():
            head = f"{tactic.name.lower():<20}{number:>14,}  "
            yield _wrapped(f"{head}{tactic.value}", " " * len(head))
    yield ""
    width = max(len(name) for name in (*found.sections, "section"))
    widths = {verdict: max(len(verdict.value) + 1, 9) for verdict in ProbeOutcome}
    yield f"{'section':<{width}}{'instructions':>14}" + "".join(
        f"{verdict.value:>{widths[verdict]}}" for verdict in ProbeOutcome
    )
    for name, reasons in found.sections.items():
        parts = by_verdict(reasons)
        shares = "".join(
            f"{share(parts[verdict.value], parts['instructions']):>{widths[verdict]}}"
            for verdict in ProbeOutcome
        )
        yield f"{name:<{width}}{parts['instructions']:>14,}{shares}"


def _wrapped(text: str, indent: str) -> str:
    return fill(text, _WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def share(number: int, of: int) -> str:
    """Return what per cent of `of` the count `number` is, as text; return "-" if `of` is 0."""
    return f"{100 * number / of:.1f} %" if of else "-"


def _sum(parts: Iterable[Reasons]) -> Reasons:
    total: Reasons = Counter()
    for part in parts:
        total.update(part)
    return total
