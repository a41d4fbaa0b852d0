"""`kprobefs coverage`: prints the coverage of kernels as text or JSON, and writes pages and a picture."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from emulated_kernel.util.config import HOST
from kprobefs.common.errors import CliError, ExitStatus, escape_for_terminal
from kprobefs.common.output_file import OutputFile
from kprobefs.common.terminal import lines_of
from kprobefs.measure.cluster import check_installed
from kprobefs.measure.coverage import Coverage, Source, as_dict, by_verdict, coverage, share, tables
from kprobefs.measure.results_file import ResultsFile
from kprobefs.measure.verdicts import ProbeOutcome, profile_text
from kprobefs.plan.coverage_pages import PagesDirectory
from kprobefs.plan.coverage_plot import bars
from kprobefs.plan.planned_kernel import check_own_kprobes

_WIDTH = 80
_COLUMN = 12
_NARROW_COLUMN = 10
"""Width in characters of a column of a table, if the table has many columns."""
_HEAD_WIDTH = 20
"""Minimum width in characters of the first column of a table."""
_MOST = 20
"""Maximum number of functions in the comparison of kernels."""


def run(
    *,
    arch: str | None,
    images: Sequence[str],
    functions: str | None,
    vmcore: str | None,
    profile: str | None,
    strategy: str | None,
    cpu: str | None,
    kprobes: str,
    pattern: str | None,
    jobs: int | None,
    scheduler: str | None,
    results: str | None,
    compare: bool,
    as_json: bool,
    html: str | None,
    plot: str | None,
) -> None:
    """Run `kprobefs coverage`: print tables, or all counts as JSON.

    `compare` prints one table for all kernels. `html` is a directory for pages, and `plot` a file for a
    picture. With either, nothing is printed unless `compare` or `as_json` is True. `jobs`: number of
    processes; None means one per CPU. `scheduler` is the address of a Dask cluster, and `results` a file for
    finished parts. The other arguments select the kernels and functions. Raises: CliError (options that
    exclude each other, a kernel that can't be read, a file that can't be written).
    """
    if strategy is not None and functions is not None:
        why = "a recording lacks the kernel's data, which may lead into replaced bytes; leave it out"
        raise CliError(f"--strategy: {why}", ExitStatus.USAGE)
    has_kernel = bool(images) or vmcore is not None
    check_own_kprobes(kprobes, has_kernel=has_kernel, profile=profile, strategy=strategy)
    if cpu is not None and not images:
        why = "only possible with a distribution's kernel; add --image, or leave it out"
        raise CliError(f"--cpu: {why}", ExitStatus.USAGE)
    if scheduler is not None:
        check_installed()
        if cpu is not None and os.sep in cpu:
            # A name without a directory may be a model's.
            cpu = os.path.abspath(cpu)
        if jobs is not None:
            why = "the cluster decides how many processes there are; leave it out"
            raise CliError(f"--jobs: {why}", ExitStatus.USAGE)
    found = []
    with ExitStack() as stack:
        file = None if results is None else stack.enter_context(ResultsFile(results))
        pages = None if html is None else stack.enter_context(PagesDirectory(Path(html)))
        picture = None if plot is None else stack.enter_context(OutputFile(plot))
        for image in images or (None,):
            source = Source(arch, _whole(image), _whole(functions), _whole(vmcore), cpu, pattern, kprobes)
            found += coverage(
                source.group(),
                profile,
                strategy,
                jobs or len(os.sched_getaffinity(0)),
                source=source,
                scheduler=scheduler,
                results=file,
            )
        try:
            if pages is not None:
                pages.write(found)
            if picture is not None:
                picture.write(bars(found).encode())
        except CliError:
            _print(found, compare=compare, as_json=as_json)
            raise
    if as_json or compare or (html is None and plot is None):
        _print(found, compare=compare, as_json=as_json)


def _print(found: Sequence[Coverage], *, compare: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps([as_dict(each) for each in found]))
    elif compare:
        print("\n".join(_compared(found)))
    else:
        print("\n\n".join("\n".join(tables(each)) for each in found))


def _whole(path: str | None) -> str | None:
    """Return an existing path as an absolute path, because workers may have other working directories.

    Return `path` unchanged if it is None or does not exist, or if it is `host`, the value that selects the
    kernel of this host.
    """
    if path is None or path == HOST or not os.path.exists(path):
        return path
    return os.path.abspath(path)


def _compared(found: Sequence[Coverage]) -> Iterator[str]:
    """Yield the lines of tables that compare kernels, with a column for each kernel.

    The first table has the shares of the outcomes. The second one has functions with different numbers of
    optimized instructions; see _differing().
    """
    for number, each in enumerate(found, 1):
        text = f"{number}  {escape_for_terminal(each.subject.title)}, profile "
        text += profile_text(each.profile, each.subject.tables)
        yield from lines_of(text, _WIDTH, "   ")
    counts = [by_verdict(each.total) for each in found]
    yield ""
    yield _row("of what registers", [str(number) for number in range(1, len(found) + 1)])
    for verdict in (ProbeOutcome.OPTIMIZED, ProbeOutcome.BREAKPOINT, ProbeOutcome.FTRACE):
        registered = [each["instructions"] - each[ProbeOutcome.REFUSED.value] for each in counts]
        shares = [share(each[verdict.value], of) for each, of in zip(counts, registered, strict=True)]
        yield _row(verdict.value, shares)
    yield _row("instructions", [f"{each['instructions']:,}" for each in counts])
    yield _row("functions", [f"{len(each.symbols):,}" for each in found])
    yield _row(ProbeOutcome.REFUSED.value, [f"{each[ProbeOutcome.REFUSED.value]:,}" for each in counts])
    differing = _differing(found)
    if differing:
        yield ""
        yield _row("optimized places of", [str(number) for number in range(1, len(found) + 1)])
        for name, numbers in differing[:_MOST]:
            yield _row(escape_for_terminal(name), ["-" if n is None else f"{n:,}" for n in numbers])
        if len(differing) > _MOST:
            yield f"{len(differing) - _MOST:,} more functions differ (--json has all)"


def _row(head: str, columns: Sequence[str]) -> str:
    """Return a row of a table: `head`, then a cell for each text in `columns`.

    Cells that do not fit on the line follow on further lines.
    """
    width = _COLUMN if _COLUMN * len(columns) <= _WIDTH - _HEAD_WIDTH else _NARROW_COLUMN
    most = (_WIDTH - _HEAD_WIDTH) // width
    room = _WIDTH - width * min(len(columns), most)
    lines = []
    for start in range(0, len(columns), most):
        cells = "".join(f"{column:>{width}}" for column in columns[start : start + most])
        lines.append(f"{head[:room]:<{room}}{cells}")
        head = ""
    return "\n".join(lines)


def _differing(found: Sequence[Coverage]) -> list[tuple[str, list[int | None]]]:
    """Return the functions whose number of optimized instructions differs between the kernels.

    An item is (name, the number in each kernel). The functions with the largest differences come first. The
    number is None if a kernel lacks the function.
    """
    counted: list[dict[str, int]] = []
    for each in found:
        names: dict[str, int] = {}
        for symbol, reasons in each.symbols:
            optimized = by_verdict(reasons)[ProbeOutcome.OPTIMIZED.value]
            names[symbol.name] = names.get(symbol.name, 0) + optimized
        counted.append(names)
    every = dict.fromkeys(name for names in counted for name in names)
    rows = [(name, [names.get(name) for names in counted]) for name in every]
    differing = [row for row in rows if len(set(row[1])) > 1]
    return sorted(differing, key=lambda row: -_spread(row[1]))


def _spread(numbers: Sequence[int | None]) -> int:
    known = [number or 0 for number in numbers]
    return max(known) - min(known)
