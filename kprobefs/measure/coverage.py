"""`kprobefs coverage`: how many of a kernel's instructions can be probed or optimized, and the reasons."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from emulated_kernel.arch.analysis.reject_reason import RejectReason
from emulated_kernel.arch.analysis.tactic import Tactic, Tactics
from emulated_kernel.image.kallsyms import Symbol
from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.kprobes.profile import with_strategy
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field, replace
from emulated_kernel.util.fast_named_tuple import NamedTuple
from emulated_kernel.util.garbage_collection import garbage_collection_stopped
from emulated_kernel.util.similar_names import similar_names_hint
from kprobefs.common.errors import CliError, ExitStatus, explained
from kprobefs.common.progress import Progress
from kprobefs.common.similar_symbols import nearest_symbols
from kprobefs.common.terminal import lines_of
from kprobefs.measure import coverage_subject
from kprobefs.measure.cluster import code_digest, run_on_cluster
from kprobefs.measure.coverage_subject import Subject
from kprobefs.measure.results_file import ResultsFile, finish
from kprobefs.measure.verdicts import (
    Judge,
    ProbeOutcome,
    chosen_profile,
    outcome_of,
    own_profile,
    profile_text,
)
from kprobefs.mount_options import KERNEL_KPROBES, KPROBES

_WIDTH = 80
_PIECE = 1 << 14
"""Approximate total size in bytes of the functions that a process examines as one piece of work."""
Reasons = Counter[RejectReason | Tactics | None]
"""Reason why a probe is not optimized, tactics that its jump needs, or None -> number of instructions.

None: Linux's rule lets a jump be written at the instruction. Tactics relax this rule.
"""


@dataclass
class Coverage:
    """Result of `kprobefs coverage` for one kernel (its subject).

    For each function, it counts the instructions by the reason why a probe there is optimized or not.
    """

    judge: Judge
    profile: str
    symbols: list[tuple[Symbol, Reasons]] = field(default_factory=list)
    """Functions of the subject, each with its counts of instructions by reason."""
    pairs: int | None = None
    """Number of optimizable instructions as the RISC-V patch counts them; None under other policies.

    The authors of the patch ("Add OPTPROBES feature on RISCV") look at pairs: among other conditions, the
    instruction and its successor must both be movable.
    """
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
        """Return a map tactic -> number of instructions whose jump needs the tactic, alone or with others."""
        found: Counter[Tactic] = Counter()
        for reason, number in self.total.items():
            if isinstance(reason, tuple):
                found.update(dict.fromkeys(reason, number))
        return found

    @property
    def sections(self) -> dict[str, Reasons]:
        """Name of a text section -> counts of the section's functions, the largest section first."""
        found: dict[str, Reasons] = {}
        for symbol, reasons in self.symbols:
            found.setdefault(self.subject.section(symbol.address), Counter()).update(reasons)
        return dict(sorted(found.items(), key=lambda item: -item[1].total()))


@dataclass(frozen=True)
class Source:
    """Options that select the kernel to count, or a group of kernels that have the same functions."""

    arch: str | None = None
    image: str | None = None
    functions: str | None = None
    vmcore: str | None = None
    cpu: str | None = None
    pattern: str | None = None
    """Shell pattern for the names of the functions to count; None: count all functions."""
    kprobes: str = KPROBES[0]
    """Value of --kprobes: "kprobefs", or "kernel" for the own kprobes of a distribution's kernel."""

    def group(self) -> list[Subject]:
        """Read the kernels that the options name, and return them as subjects.

        Raises: CliError (a kernel cannot be read, or no function's name matches `pattern`).
        """
        if self.pattern == "":
            raise CliError("--function: the pattern is empty; give a name, or one as tcp_*", ExitStatus.USAGE)
        group = self._read()
        # On x86, both ways have the same verdicts.
        if self.kprobes == KERNEL_KPROBES and group[0].arch not in coverage_subject.WITH_OPTPROBES:
            group = [replace(subject, has_own_kprobes=True) for subject in group]
        if self.pattern is None:
            return group
        found = [subject.of_functions(self.pattern) for subject in group]
        if not found[0].symbols:
            near = nearest_symbols(self.pattern, group[0].tables.kallsyms)
            why = f"no such function in {group[0].title}{similar_names_hint(near)}"
            raise CliError(f"--function {self.pattern}: {why}", ExitStatus.USAGE)
        return found

    def _read(self) -> list[Subject]:
        with explained(self.image or self.functions or self.vmcore or self.arch or ""):
            if self.image is not None and self.cpu is not None:
                return [coverage_subject.booted_image(self.image, self.cpu)]
            if self.image is not None:
                return list(coverage_subject.linux_image(self.image))
            if self.functions is not None:
                return [coverage_subject.recorded_functions(Path(self.functions))]
            if self.vmcore is not None:
                return [coverage_subject.dumped_kernel(self.vmcore)]
            return [coverage_subject.own_image(self.arch or "x86_64")]


class Counting(NamedTuple):
    """Counts of the instructions of one function in one kernel."""

    reasons: Reasons
    pairs: int
    seconds: float
    """CPU time of the analysis in seconds; 0 if an earlier kernel has the function with the same code."""


def coverage(
    group: Sequence[Subject],
    profile_name: str | None,
    strategy: str | None = None,
    jobs: int = 1,
    *,
    source: Source | None = None,
    scheduler: str | None = None,
    results: ResultsFile | None = None,
) -> list[Coverage]:
    """Count the instructions of the functions of `group` by the reason why a probe is optimized or not.

    The subjects of a group have the same functions; code that does not differ is examined once.
    `strategy`: optimization policy in place of the profile's. `jobs`: number of processes. `scheduler`:
    address of the Dask cluster that counts in place of processes; its workers read the kernels from `source`.
    `results`: file of finished counts, which are not counted again.
    Raises: CliError (the profile is unknown, or has no optimizer; a process has ended; the cluster fails).
    """
    first = group[0]
    counter = FunctionCounter.of(group, profile_name, strategy)
    found = [Coverage(judge, judge.profile.title) for judge in counter.judges]
    with Progress(first.title, sum(symbol.size for symbol in first.symbols)) as progress:
        if scheduler is not None:
            assert source is not None
            run = counter.on_cluster(scheduler, (source, profile_name, strategy))
        else:
            run = counter.in_processes(jobs)
        for symbol, counted in zip(first.symbols, counter.count(run, progress, results), strict=True):
            for coverage_of, one in zip(found, counted, strict=True):
                coverage_of.symbols.append((symbol, one.reasons))
                coverage_of.seconds += one.seconds
                if counter.counts_pairs:
                    coverage_of.pairs = (coverage_of.pairs or 0) + one.pairs
    return found


Run = Callable[[list[int]], Iterable[tuple[int, Any]]]
"""Function that counts pieces (groups of functions), given their numbers; see FunctionCounter.count_piece().

It yields (number of a piece, its encoded counts) in any order.
"""


class FunctionCounter:
    """For each kernel of a group, counts the instructions of each function by verdict.

    All kernels of the group have the same functions.
    """

    def __init__(self, judges: Sequence[Judge], *, is_local: bool) -> None:
        """Store the judges, one for each kernel. A judge returns the verdict for each instruction.

        `is_local`: True if a verdict depends only on the function's own code and tables. Then a function that
        has the same code in several kernels is examined once. If False, it is examined in each kernel.
        """
        self.judges = judges
        self._is_local = is_local
        strategy = judges[0].strategy
        self.counts_pairs = bool(strategy and strategy.pairs)
        self._pieces = list(_pieces(judges[0].subject.symbols))

    @classmethod
    def of(cls, group: Sequence[Subject], profile_name: str | None, strategy: str | None) -> FunctionCounter:
        """Return a counter for the subjects `group`.

        Raises: CliError (the profile is unknown, or has no optimizer).
        """
        first = group[0]
        try:
            profile = with_strategy(chosen_profile(profile_name, first.arch, first.tables), strategy)
            if first.has_own_kprobes and isinstance(first.tables, LinuxKernel):
                profile = own_profile(profile, first.tables)
            judges = [Judge(subject, profile) for subject in group]
        except KernelError as error:
            raise CliError(str(error.strerror), ExitStatus.USAGE) from error
        # With a strategy, the verdict may also depend on references from other functions.
        return cls(judges, is_local=strategy is None)

    def counting(self, symbol: Symbol) -> list[Counting]:
        """Return the counts of one function, for each kernel in the order of the group."""
        seen: dict[bytes, Counting] = {}
        found = []
        for judge in self.judges:
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
        self, run: Run, progress: Progress | None = None, file: ResultsFile | None = None
    ) -> Iterator[list[Counting]]:
        """Yield, for each function in order, its counts in each kernel.

        `run` counts pieces, which are groups of functions; see count_piece(). `progress`: bar that shows the
        finished pieces, or None. `file`: results file whose pieces are not counted again, or None.
        Raises: CliError (a process has ended, the cluster fails, the file has wrong counts).
        """
        found: dict[int, list[list[Counting]]] = {}
        with garbage_collection_stopped():
            for number, counted in finish(len(self._pieces), run, self.digest if file else "", file):
                try:
                    found[number] = _decoded(counted, len(self._pieces[number]), len(self.judges))
                except (ValueError, TypeError, KeyError) as error:
                    raise CliError("--results: the file has wrong counts; remove it") from error
                if progress is not None:
                    progress.add(sum(symbol.size for symbol in self._pieces[number]))
        for number in range(len(self._pieces)):
            yield from found.pop(number)

    @cached_property
    def digest(self) -> str:
        """Return a digest of everything on which the counts depend: kernels, rules, and kprobefs's code."""
        parts: list[object] = [code_digest()]
        for judge in self.judges:
            tables = judge.subject.tables
            parts += [judge.profile, judge.subject.symbols, tables.kallsyms.symbols, tables.text_ranges]
            parts += map(list, (tables.mcount, tables.ex_table, tables.bugs, tables.jump_labels))
            parts += [list(tables.static_calls), list(tables.blacklist), judge.subject.title]
            parts.append(judge.subject.has_own_kprobes)
            parts += [tables.read(start, end - start) for start, end in tables.text_ranges]
            for start, data in tables.data:
                parts += [start, bytes(data)]
        digest = sha256()
        for part in parts:
            digest.update(sha256(part if isinstance(part, bytes) else repr(part).encode()).digest())
        return digest.hexdigest()

    def count_piece(self, number: int) -> Any:
        """Return the counts of the functions in the piece `number`, encoded as in a results file.

        A piece is the functions that one process examines at a time.
        """
        return _encoded([self.counting(symbol) for symbol in self._pieces[number]])

    def in_processes(self, jobs: int) -> Run:
        """Return a Run that counts pieces in `jobs` forked processes, or in this process if `jobs` is 1."""

        def run(numbers: list[int]) -> Iterator[tuple[int, Any]]:
            if jobs < 2 or len(numbers) < 2:
                yield from ((number, self.count_piece(number)) for number in numbers)
                return
            # Processes share the memory of all code that is decoded before the fork.
            self.counting(self._pieces[0][0])
            yield from zip(numbers, self._fork(numbers, jobs), strict=True)

        return run

    def on_cluster(self, scheduler: str, names: _Names) -> Run:
        """Return a Run that counts pieces on a Dask cluster, whose workers read the same kernels.

        `scheduler`: address of the cluster's scheduler. `names`: arguments from which a worker makes its
        counter.
        """

        def run(numbers: list[int]) -> Iterator[tuple[int, Any]]:
            arguments = [(names, self.digest, number) for number in numbers]
            for index, counted in run_on_cluster(scheduler, count_on_worker, arguments):
                yield numbers[index], counted

        return run

    def _fork(self, numbers: Sequence[int], jobs: int) -> Iterator[Any]:
        from concurrent.futures import ProcessPoolExecutor
        from concurrent.futures.process import BrokenProcessPool
        from multiprocessing import get_context

        global _forked
        _forked = self
        try:
            with ProcessPoolExecutor(jobs, get_context("fork")) as pool:
                yield from pool.map(_count_number, numbers)
        except BrokenProcessPool as error:
            raise CliError(
                "coverage: a process was ended from outside; run it again with --jobs 1"
            ) from error
        finally:
            _forked = None


_forked: FunctionCounter | None = None
"""Counter that forked processes of FunctionCounter use; None while no processes are forked.

The processes inherit this variable, because a counter contains kernels, which are too large to send.
"""


def _count_number(number: int) -> Any:
    assert _forked is not None
    return _forked.count_piece(number)


_Names = tuple[Source, str | None, str | None]
"""Arguments from which a worker makes its counter: source of the kernels, profile's name, and strategy."""
_counters: dict[_Names, FunctionCounter] = {}
"""Arguments -> counter that this worker of a cluster has made from them. Only the last one is kept."""
_one_at_a_time = Lock()
"""Lock around _counters and the use of a counter, because a worker has several threads."""


def count_on_worker(names: _Names, digest: str, number: int) -> Any:
    """Count the piece `number` in a worker of a Dask cluster, and return the counts.

    See FunctionCounter.count_piece().

    `digest`: value of FunctionCounter.digest in the command's process.

    Raises: CliError (the kernel cannot be read, or differs from the command's).
    """
    source, profile, strategy = names
    with _one_at_a_time:
        counter = _counters.get(names)
        if counter is None:
            counter = FunctionCounter.of(source.group(), profile, strategy)
            _counters.clear()
            _counters[names] = counter
        if counter.digest != digest:
            title = counter.judges[0].subject.title
            raise CliError(f"the worker has read another kernel, {title}; copy the file there")
        with garbage_collection_stopped():
            return counter.count_piece(number)


_PLAIN = ""
"""Name in encoded counts for a jump that Linux's rule allows."""
_TACTIC = "+"
"""Sign before the name of a tactic, in encoded counts."""


def _encoded(piece: Sequence[Sequence[Counting]]) -> list[Any]:
    """Return the counts of a piece as lists and dictionaries for JSON, which _decoded() reads.

    `piece`: for each function of the piece, its counts in each kernel. Each Counting becomes a list: a map
    name of a reason -> number of instructions, `pairs`, and `seconds`.
    """
    return [
        [
            [{_name(reason): n for reason, n in one.reasons.items()}, one.pairs, round(one.seconds, 6)]
            for one in function
        ]
        for function in piece
    ]


def _name(reason: RejectReason | Tactics | None) -> str:
    if isinstance(reason, RejectReason):
        return reason.name
    # The sign distinguishes a tactic from a reason of the same name.
    return _PLAIN if reason is None else " ".join(f"{_TACTIC}{tactic.name}" for tactic in reason)


def _decoded(piece: Any, functions: int, subjects: int) -> list[list[Counting]]:
    """Decode the result of _encoded(): return, for each function, a list with its counts in each subject.

    `functions`, `subjects`: the expected numbers of functions and of subjects.
    Raises: ValueError (other numbers, or a value is no number), TypeError (another form), KeyError (an
    unknown reason).
    """
    found = [
        [
            Counting(Counter({_reason(name): int(n) for name, n in reasons.items()}), int(pairs), seconds)
            for reasons, pairs, seconds in function
        ]
        for function in piece
    ]
    if len(found) != functions or any(len(function) != subjects for function in found):
        raise ValueError("counts of another number of functions")
    return found


@cache
def _reason(name: str) -> RejectReason | Tactics | None:
    if name == _PLAIN:
        return None
    if name.startswith(_TACTIC):
        return tuple(Tactic[each.removeprefix(_TACTIC)] for each in name.split(" "))
    return RejectReason[name]


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


# JSON


def as_dict(found: Coverage) -> dict[str, Any]:
    """Return all counts of a kernel as a dictionary for JSON."""
    total = found.total
    return {
        "subject": found.subject.title,
        "arch": found.subject.arch,
        "profile": found.profile,
        "remarks": list(found.judge.remarks),
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
    """Convert counts by reason to a map: name of an outcome -> number of instructions.

    The value of the key `instructions` is the sum.
    """
    found = dict.fromkeys((verdict.value for verdict in ProbeOutcome), 0)
    for reason, number in reasons.items():
        found[outcome_of(reason).value] += number
    return {"instructions": reasons.total(), **found}


# Text


def _with_jumps(found: Coverage) -> int:
    """Return the number of functions that have at least one optimized instruction."""
    return sum(by_verdict(reasons)[ProbeOutcome.OPTIMIZED.value] > 0 for _, reasons in found.symbols)


def tables(found: Coverage) -> Iterator[str]:
    """Yield the lines of the tables for one kernel."""
    total = found.total
    counted = total.total()
    title = found.subject.title
    arch = found.subject.arch
    profile = profile_text(found.profile, found.subject.tables)
    yield _wrapped(f"{title}{'' if title.endswith(arch) else f' ({arch})'}, profile {profile}", "  ")
    yield f"{counted:,} instructions of {len(found.symbols):,} functions"
    for remark in found.judge.remarks:
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
    yield f"{_with_jumps(found):,} of {len(found.symbols):,} functions have an optimized instruction"
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
    return "\n".join(lines_of(text, _WIDTH, indent))


def share(number: int, of: int) -> str:
    """Return `number` as a percentage of `of`, as text; return "-" if `of` is 0."""
    return f"{100 * number / of:.1f} %" if of else "-"


def _sum(parts: Iterable[Reasons]) -> Reasons:
    total: Reasons = Counter()
    for part in parts:
        total.update(part)
    return total
