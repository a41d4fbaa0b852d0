"""Where an expression of a histogram is split, and what in it is a reference."""

from __future__ import annotations

from emulated_kernel.trace.hist.field import Operator


def find_operator(text: str) -> tuple[Operator, int] | None:
    """The root operator of an expression and where it stands: the last of those that bind least.

    Mirrors: kernel/trace/trace_events_hist.c:contains_operator (v6.1).
    """
    minus, plus = text.rfind("-"), text.rfind("+")
    if minus == 0:
        return Operator.UNARY_MINUS, 0
    if plus >= 0 or minus > 0:
        return (Operator.PLUS, plus) if plus > minus else (Operator.MINUS, minus)
    div, mult = text.rfind("/"), text.rfind("*")
    if mult > div:
        return Operator.MULT, mult
    return (Operator.DIV, div) if div >= 0 else None


def is_reference(text: str) -> bool:
    """Whether it is `$` and a name."""
    return len(text) >= 2 and text.startswith("$")
