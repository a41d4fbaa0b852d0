"""The coverage of kernels as HTML pages: an index of the functions, and a listing for each function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Self

from emulated_kernel.arch.analysis.disassembly import address_names
from emulated_kernel.image.kallsyms import Symbol
from kprobefs.common.errors import CliError, escape_for_terminal
from kprobefs.common.output_file import OutputFile
from kprobefs.common.progress import Progress
from kprobefs.measure.coverage import Coverage, Reasons, by_verdict, share
from kprobefs.measure.verdicts import Judge, ProbeOutcome, Verdict
from kprobefs.plan.picture import COLOURS

_INDEX = "index.html"
_COLOURS = "".join(f".{verdict.value}{{color:{colour}}}" for verdict, colour in COLOURS.items())
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;color:#1f2328}h1{font-size:1.4rem}"
    "table{border-collapse:collapse}td,th{padding:.1rem .8rem;text-align:right;white-space:nowrap}"
    "td:first-child,th:first-child,.text{text-align:left}tbody tr:hover{background:#f6f8fa}"
    "th button{all:unset;cursor:pointer;font-weight:600}th button:focus-visible{outline:2px solid #0969da}"
    "th[aria-sort=ascending] button::after{content:' \\25b2'}"
    "th[aria-sort=descending] button::after{content:' \\25bc'}"
    ".listing td,.listing th{text-align:left;font-family:ui-monospace,monospace}input{margin:.5rem 0}"
    "tfoot td{border-top:1px solid #d0d7de;font-weight:600}" + _COLOURS
)
_SCRIPT = """
const table = document.querySelector("table.functions"), body = table.tBodies[0];
const heads = [...table.tHead.rows[0].cells];
const value = (row, at) => row.cells[at].dataset.value ?? row.cells[at].textContent;
heads.forEach((head, at) => head.firstChild.addEventListener("click", () => {
  const now = head.getAttribute("aria-sort");
  const up = now === "descending" || (at < 2 && now !== "ascending");
  heads.forEach(other => other.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const order = at < 2 ? (a, b) => value(a, at).localeCompare(value(b, at))
                       : (a, b) => value(a, at) - value(b, at);
  body.append(...[...body.rows].sort((a, b) => up ? order(a, b) : order(b, a)));
}));
document.querySelector("input").addEventListener("input", event => {
  for (const row of body.rows) row.hidden = !row.cells[0].textContent.includes(event.target.value);
});
""".strip()
"""Script of the index: a click on a column's head sorts the functions, and the field selects some of them."""
_COLUMNS = (
    "function",
    "section",
    "instructions",
    *(verdict.value for verdict in ProbeOutcome),
    "optimized, %",
)


class PagesDirectory:
    """Context manager for the directory of the pages, which is made before the kernels are counted.

    Existing files with other names are kept. If no page is written, the end of the context removes the index
    and the directory if they are new.
    """

    def __init__(self, directory: Path) -> None:
        """Make the directory, and open its index. Raises: CliError (a file can't be written)."""
        self._directory = directory
        if directory.exists() and not directory.is_dir():
            raise CliError(f"{directory}: not a directory; --html takes a directory for pages")
        self._is_new = not directory.exists()
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise CliError(f"{error.filename or directory}: {error.strerror}") from error
        self._index = OutputFile(directory / _INDEX)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._index.__exit__()
        if self._is_new:
            # A directory with pages is not empty.
            with suppress(OSError):
                self._directory.rmdir()

    def write(self, found: Sequence[Coverage]) -> None:
        """Write the pages of all kernels.

        If there are several kernels, the pages of each are in a directory of their own.
        Raises: CliError (a file can't be written).
        """
        try:
            if len(found) == 1:
                _write_functions(self._directory, found[0])
                self._index.write("\n".join(_index(found[0])).encode())
                return
            for number, each in enumerate(found, 1):
                own = self._directory / str(number)
                own.mkdir(exist_ok=True)
                _write_functions(own, each)
                (own / _INDEX).write_text("\n".join(_index(each)), encoding="utf-8")
            self._index.write("\n".join(_overview(found)).encode())
        except OSError as error:
            raise CliError(f"{error.filename or self._directory}: {error.strerror}") from error


def _write_functions(directory: Path, found: Coverage) -> None:
    with Progress("pages", len(found.symbols)) as progress:
        for symbol, reasons in found.symbols:
            page = "\n".join(_function(found, symbol, reasons))
            (directory / _file_name(symbol)).write_text(page, encoding="utf-8")
            progress.add(1)


def _file_name(symbol: Symbol) -> str:
    # Names of functions may differ in case only, or have characters that a file's name can't have.
    return f"{symbol.address:x}.html"


def _overview(found: Sequence[Coverage]) -> Iterator[str]:
    yield from _head("Coverage of probes")
    yield "<table><thead><tr><th>kernel</th><th>instructions</th><th>optimized</th></tr></thead><tbody>"
    for number, each in enumerate(found, 1):
        counts = by_verdict(each.total)
        optimized = share(counts[ProbeOutcome.OPTIMIZED.value], counts["instructions"])
        title = _escaped(f"{each.subject.title}, profile {each.profile}")
        yield f'<tr><td><a href="{number}/{_INDEX}">{title}</a></td>'
        yield f"<td>{counts['instructions']:,}</td><td>{optimized}</td></tr>"
    yield "</tbody></table></body></html>\n"


def _index(found: Coverage) -> Iterator[str]:
    yield from _head(f"{found.subject.title}, profile {found.profile}")
    for remark in found.judge.remarks:
        yield f"<p>{_escaped(remark)}</p>"
    yield '<label>functions with <input type="search"></label>'
    heads = "".join(f'<th scope="col"><button type="button">{column}</button></th>' for column in _COLUMNS)
    yield f'<table class="functions"><thead><tr>{heads}</tr></thead><tbody>'
    for symbol, reasons in found.symbols:
        link = f'<a href="{_file_name(symbol)}">{_escaped(symbol.name)}</a>'
        section = _escaped(found.subject.section(symbol.address))
        yield f'<tr><td>{link}</td><td class="text">{section}</td>{_cells(reasons)}</tr>'
    yield f"</tbody><tfoot><tr><td>all</td><td></td>{_cells(found.total)}</tr></tfoot></table>"
    yield f"<script>{_SCRIPT}</script></body></html>\n"


def _cells(reasons: Reasons) -> str:
    counts = by_verdict(reasons)
    numbers = [counts["instructions"], *(counts[verdict.value] for verdict in ProbeOutcome)]
    cells = "".join(f'<td data-value="{number}">{number:,}</td>' for number in numbers)
    optimized = counts[ProbeOutcome.OPTIMIZED.value]
    value = optimized / counts["instructions"] if counts["instructions"] else -1
    return f'{cells}<td data-value="{value:.6f}">{share(optimized, counts["instructions"])}</td>'


def _function(found: Coverage, symbol: Symbol, reasons: Reasons) -> Iterator[str]:
    judge = found.judge
    tables = judge.subject.tables
    yield from _head(symbol.name)
    counts = by_verdict(reasons)
    summary = ", ".join(f"{verdict.value} {counts[verdict.value]:,}" for verdict in ProbeOutcome)
    where = f"{symbol.address:#x} in {judge.subject.section(symbol.address)}"
    yield f'<p><a href="{_INDEX}">{_escaped(found.subject.title)}</a>: {_escaped(where)}; {summary}</p>'
    yield '<table class="listing"><thead><tr><th>offset</th><th>bytes</th><th>instruction</th>'
    yield "<th>probe</th><th>rule</th></tr></thead><tbody>"
    code = tables.read(symbol.address, symbol.size)
    for at, size, text, verdict in _insns(judge, symbol, code):
        offset = at - symbol.address
        shown = code[offset : offset + size].hex(" ")
        outcome = verdict.outcome.value
        yield f"<tr><td>+{offset:#x}</td><td>{shown}</td><td>{_escaped(text)}</td>"
        yield f'<td class="{outcome}">{outcome}</td><td>{_escaped(_rule(verdict))}</td></tr>'
    yield "</tbody></table></body></html>\n"


def _insns(judge: Judge, symbol: Symbol, code: bytes) -> Iterator[tuple[int, int, str, Verdict]]:
    """Yield (address, size in bytes, text, verdict) of each instruction of a function.

    `code`: machine code of the function.
    """
    start = symbol.address
    names = address_names(judge.subject.tables.kallsyms.lookup)
    insns = judge.arch.disassembler.insns
    ends = dict(pairwise([*judge.checker.boundaries(symbol), start + len(code)]))
    texts = {(at, size): text for at, size, text in insns(code, start, names)}
    for at, verdict in judge.verdicts(symbol).items():
        size = ends[at] - at
        text = texts.get((at, size))
        if text is None:
            # The sweep stops at bytes that are no instruction.
            own = insns(code[at - start : ends[at] - start], at, names)
            text = next((each for _, _, each in own), "(bad)")
        yield at, size, text, verdict


def _rule(verdict: Verdict) -> str:
    if verdict.rejection is not None:
        return str(verdict.rejection.reason.value)
    tactics = () if verdict.region is None else verdict.region.tactics
    return "; ".join(each.value for each in tactics)


def _head(title: str) -> Iterator[str]:
    yield "<!DOCTYPE html>"
    yield '<html lang="en"><head><meta charset="utf-8">'
    yield '<meta name="viewport" content="width=device-width,initial-scale=1">'
    yield f"<title>{_escaped(title)}</title><style>{_STYLE}</style></head><body><h1>{_escaped(title)}</h1>"


def _escaped(text: str) -> str:
    """Return `text` escaped for HTML. Control characters, which a kernel's names may have, become escapes."""
    return escape(escape_for_terminal(text))
