"""The disassemblies of explanations as an SVG picture, for slides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from textwrap import wrap

from kprobefs.common.errors import escape_for_terminal
from kprobefs.measure.verdicts import ProbeOutcome
from kprobefs.plan.arrows import Arrow, arrows
from kprobefs.plan.explanation import Explanation
from kprobefs.plan.listing import Listing, Row, listing
from kprobefs.plan.text import WIDTH, answers

_LANES = 8
_ROW = 20
"""Height of a row in pixels."""
_CHARACTER = 8
"""Width of a character in pixels: 0.6 of the font size, rounded up, as some renderers do."""
_FONT = 13
_LANE = 10
"""Horizontal distance in pixels between neighbouring arrows."""
_MARGIN = 16
COLOURS = {
    ProbeOutcome.OPTIMIZED: "#1a7f37",
    ProbeOutcome.BREAKPOINT: "#9a6700",
    ProbeOutcome.FTRACE: "#0969da",
    ProbeOutcome.REFUSED: "#cf222e",
}
"""Outcome -> colour of its text."""
_STYLE = (
    f"text{{font-size:{_FONT}px;font-family:'DejaVu Sans Mono',Menlo,ui-monospace,monospace;fill:#1f2328}}"
    "text{white-space:pre}"
    ".title{font-weight:bold}.dim{fill:#656d76}.arrow{fill:none;stroke:#656d76;stroke-width:1.2}"
    ".bracket{fill:none;stroke-width:2}.place{fill:#fff8c5}"
)


def picture(found: Sequence[Explanation], *, whole: bool) -> str:
    """Return an SVG document with the listings of explanations, one below another. `whole`: see listing()."""
    parts: list[str] = []
    top = _MARGIN
    width = 0.0
    for explained in found:
        drawing = _Drawing(explained, listing(explained, whole=whole), top)
        parts += drawing.elements()
        top = drawing.bottom + _MARGIN
        width = max(width, drawing.width)
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{top}" '
        f'viewBox="0 0 {width:.0f} {top}" role="img" xml:space="preserve">'
    )
    title = escape(escape_for_terminal(", ".join(explained.title for explained in found)))
    background = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return "\n".join((head, f"<title>{title}</title><style>{_STYLE}</style>", background, *parts, "</svg>\n"))


class _Drawing:
    """The drawing of one explanation's listing. `top`: y coordinate of its upper edge, in pixels."""

    def __init__(self, explained: Explanation, shown: Listing, top: int) -> None:
        self._explained = explained
        self._shown = shown
        self._arrows = arrows(shown.jumps, _LANES)
        lanes = 1 + max((arrow.lane for arrow in self._arrows), default=-1)
        self._left = _MARGIN + _LANE * (lanes + 2)
        """x coordinate, in pixels, of the bracket around the instructions that a jump replaces.

        The arrows are left of it, and the columns of text are right of it.
        """
        code = max((len(row.insn.code) for row in shown.rows), default=0)
        text = max((len(row.insn.text) for row in shown.rows), default=0)
        self._columns: list[float] = [self._left + _MARGIN]
        for characters in (8, 3 * code, text + 2):
            self._columns.append(self._columns[-1] + characters * _CHARACTER)
        _, verdict = next(answers(explained))
        self._titles = (
            f"{explained.title}: {explained.verdict.outcome.value} in {explained.kernel.title}",
            explained.prototype_text,
            *(
                wrap(verdict[0], WIDTH, subsequent_indent="  ", break_on_hyphens=False)
                if explained.reason
                else ()
            ),
        )
        self._title = top + _ROW
        """y coordinate, in pixels, of the first title's base line."""
        self._top = top + (1 + len(self._titles)) * _ROW
        """y coordinate, in pixels, of the upper edge of the listing's first row."""
        longest = max((len(text) for _, text in shown.notes), default=0) + 3
        longest = max(longest, *map(len, self._titles))
        self.width = max(self._columns[-1] + 13 * _CHARACTER, _MARGIN + longest * _CHARACTER) + _MARGIN
        self.bottom = self._y(len(shown.rows)) + len(shown.notes) * _ROW

    def elements(self) -> Iterator[str]:
        """Yield the SVG elements that draw the listing."""
        for number, title in enumerate(self._titles):
            yield _text(_MARGIN, self._title + number * _ROW, title, "dim" if number else "title")
        for number, row in enumerate(self._shown.rows):
            yield from self._row(number, row)
        for arrow in self._arrows:
            yield self._arrow(arrow)
        for number, (letter, text) in enumerate(self._shown.notes, len(self._shown.rows)):
            yield _text(_MARGIN, self._y(number) + _ROW // 2, f"{letter:1}  {text}", "dim")

    def _y(self, row: int) -> int:
        """Return the y coordinate, in pixels, of the base line of the row with the index `row`."""
        return self._top + row * _ROW + _FONT

    def _row(self, number: int, row: Row) -> Iterator[str]:
        y = self._y(number)
        insn = row.insn
        offset, code, text, verdict = self._columns
        if row.is_place:
            height = self._left - 4
            yield (
                f'<rect class="place" x="{height}" y="{y - _FONT - 2}" '
                f'width="{self.width - height - _MARGIN:.0f}" height="{_ROW}"/>'
            )
        yield _text(offset, y, f"{f'+{insn.offset:#x}':>7}", "dim")
        yield _text(code, y, insn.code.hex(" "), "dim")
        yield _text(text, y, insn.text)
        outcome = insn.verdict.outcome
        yield _text(verdict, y, f"{insn.mode} {row.note}".rstrip(), colour=COLOURS[outcome])
        if row.bracket:
            yield self._bracket(row, y - _FONT)

    def _bracket(self, row: Row, top: int) -> str:
        x = self._left
        start = f"M{x + 6},{top + 1} H{x} " if row.bracket in ("first", "only") else f"M{x},{top - 4} "
        end = f"V{top + _ROW - 5} H{x + 6}" if row.bracket in ("last", "only") else f"V{top + _ROW}"
        explained = self._explained
        outcome = ProbeOutcome.OPTIMIZED if explained.region is not None else explained.verdict.outcome
        return f'<path class="bracket" style="stroke:{COLOURS[outcome]}" d="{start}{end}"/>'

    def _arrow(self, arrow: Arrow) -> str:
        right = self._left - 6
        x = right - _LANE * (arrow.lane + 1)
        source, target = (self._y(row) - _FONT // 3 for row in (arrow.source, arrow.target))
        line = f"M{right},{source + 2} H{x} V{target - 2} H{right}"
        head = f"M{right - 5},{target - 6} L{right},{target - 2} L{right - 5},{target + 2}"
        return f'<path class="arrow" d="{line} {head}"/>'


def _text(x: float, y: float, text: str, kind: str = "", colour: str = "") -> str:
    attributes = f' class="{kind}"' if kind else ""
    if colour:
        attributes += f' style="fill:{colour}"'
    return f'<text x="{x:.0f}" y="{y}"{attributes}>{escape(escape_for_terminal(text))}</text>'
