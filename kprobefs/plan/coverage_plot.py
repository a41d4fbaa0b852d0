"""The coverage of kernels as an SVG picture: a bar for each kernel, with its shares of outcomes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from kprobefs.common.errors import escape_for_terminal
from kprobefs.measure.coverage import Coverage, by_verdict, share
from kprobefs.measure.verdicts import ProbeOutcome
from kprobefs.plan.picture import COLOURS

_WIDTH = 800
_MARGIN = 16
_BAR = 26
_ROW = 64
_FONT = 14
_LEAST_LABEL = 0.08
"""Minimum share of an outcome at which the label fits into the outcome's part of the bar."""


def bars(found: Sequence[Coverage]) -> str:
    """Return an SVG document with a bar for each kernel."""
    height = 2 * _MARGIN + _ROW * len(found) + _BAR
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" '
        f'viewBox="0 0 {_WIDTH} {height}" role="img">',
        "<title>Outcomes of probes</title>",
        f"<style>text{{font:{_FONT}px system-ui,sans-serif;fill:#1f2328}}.label{{fill:#ffffff}}</style>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for number, each in enumerate(found):
        parts += _bar(each, _MARGIN + number * _ROW)
    parts += _legend(_MARGIN + len(found) * _ROW + _FONT)
    return "\n".join((*parts, "</svg>\n"))


def _bar(found: Coverage, top: int) -> Iterator[str]:
    counts = by_verdict(found.total)
    total = counts["instructions"]
    title = escape(escape_for_terminal(f"{found.subject.title}, profile {found.profile}"))
    yield f'<text x="{_MARGIN}" y="{top + _FONT}">{title}</text>'
    left = float(_MARGIN)
    top += _FONT + 6
    for verdict in ProbeOutcome:
        width = (_WIDTH - 2 * _MARGIN) * counts[verdict.value] / total if total else 0.0
        said = share(counts[verdict.value], total)
        yield (
            f'<rect x="{left:.1f}" y="{top}" width="{width:.1f}" height="{_BAR}" fill="{COLOURS[verdict]}">'
            f"<title>{verdict.value}: {counts[verdict.value]:,} ({said})</title></rect>"
        )
        if total and counts[verdict.value] / total >= _LEAST_LABEL:
            yield f'<text class="label" x="{left + 6:.1f}" y="{top + _FONT + 4}">{said}</text>'
        left += width


def _legend(baseline: int) -> Iterator[str]:
    left = _MARGIN
    for verdict in ProbeOutcome:
        yield f'<rect x="{left}" y="{baseline - 12}" width="14" height="14" fill="{COLOURS[verdict]}"/>'
        yield f'<text x="{left + 20}" y="{baseline}">{verdict.value}</text>'
        left += 130
