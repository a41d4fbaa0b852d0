"""Explanations as one HTML page, which needs no other files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from html import escape
from itertools import groupby

from kprobefs.common.errors import escape_for_terminal
from kprobefs.plan import text
from kprobefs.plan.explanation import Explanation
from kprobefs.plan.picture import picture

_STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#1f2328}
h1{font-size:1.5rem}h2{font-size:1.2rem;margin-top:2rem}code,pre{font-family:ui-monospace,monospace}
pre{background:#f6f8fa;padding:.8rem;overflow-x:auto}figure{margin:1rem 0;overflow-x:auto}
th{text-align:left;vertical-align:top;padding-right:1.5rem;font-weight:600}td{padding:.1rem 0}
""".strip()


def page(found: Sequence[Explanation], *, whole: bool) -> str:
    """Return an HTML document with a chapter for each explanation. `whole`: see listing()."""
    titles = ", ".join(explained.title for explained in found)
    parts = [
        "<!DOCTYPE html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        f"<title>{_escaped(titles)}</title><style>{_STYLE}</style></head><body>",
    ]
    for explained in found:
        parts += _chapter(explained, whole=whole)
    return "\n".join((*parts, "</body></html>\n"))


def _chapter(explained: Explanation, *, whole: bool) -> Iterator[str]:
    kernel = explained.kernel
    yield f"<h1>{_escaped(f'{explained.title}: {explained.verdict.outcome.value}')}</h1>"
    yield f"<p>{_escaped(kernel.title)}, profile {_escaped(kernel.profile.name)}</p>"
    yield f"<pre>{_escaped(explained.prototype_text)}</pre>"
    yield f"<figure>{picture([explained], whole=whole)}</figure>"
    yield "<table>"
    for label, lines in text.answers(explained):
        yield f"<tr><th>{_escaped(label)}</th><td>{_lines(lines)}</td></tr>"
    yield "</table>"
    if explained.detour:
        yield f"<h2>{_escaped(text.detour_title(explained))}</h2>"
        yield "<table>"
        for part, insns in groupby(explained.detour, key=lambda insn: insn.part):
            shown = [f"{insn.text}{text.relocated(insn)}" for insn in insns]
            yield f"<tr><th>{_escaped(part)}</th><td><code>{_lines(shown)}</code></td></tr>"
        yield "</table>"


def _escaped(text: str) -> str:
    """Return `text` escaped for HTML. Control characters, which a kernel's names may have, become escapes."""
    return escape(escape_for_terminal(text))


def _lines(lines: Iterable[str]) -> str:
    return "<br>".join(_escaped(line) for line in lines)
