"""Parsing of histogram expressions: split expressions at operators, and qualified names at dots."""

from __future__ import annotations

from emulated_kernel.trace.hist.field import Operator
from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.trace.text.numbers import is_digit


def find_operator(text: str, interface: Interface) -> tuple[Operator, int] | None:
    """Return the operator at which an expression is split, and its index in `text`; None if it has none.

    An expression is split at its last operator of the lowest precedence. If it begins with `-` and has no
    other `-`, it is split at this unary minus. In versions without InterfaceRule.HIST_ARITHMETIC, it is split
    at its first `+` or `-`.

    Mirrors: kernel/trace/trace_events_hist.c:contains_operator (v6.1).
    """
    if InterfaceRule.HIST_ARITHMETIC not in interface:
        at = next((at for at, char in enumerate(text) if char in "+-"), None)
        if at is None:
            return None
        if text[at] == "+":
            return Operator.PLUS, at
        return (Operator.MINUS if at else Operator.UNARY_MINUS), at
    minus = text.rfind("-")
    plus = text.rfind("+")
    if minus == 0:
        return Operator.UNARY_MINUS, 0
    if plus >= 0 or minus > 0:
        return (Operator.PLUS, plus) if plus > minus else (Operator.MINUS, minus)
    div = text.rfind("/")
    mult = text.rfind("*")
    if mult > div:
        return Operator.MULT, mult
    return (Operator.DIV, div) if div >= 0 else None


def leftmost_operand(text: str, interface: Interface) -> str:
    """Return what `$NAME` stands for later in the command that defines the variable NAME by `text`.

    As in Linux, parsing leaves of an expression only the text before the first operator, so with `a=x-y,b=$a`
    the value of b is x. An expression that find_operator() splits at a unary minus stays whole. Parsing also
    cuts GROUP.EVENT.$NAME at its dots, so that only GROUP remains.
    Mirrors: kernel/trace/trace_events_hist.c:parse_expr, parse_atom (v6.1).
    """
    # Not recursive: a text may have thousands of operators.
    while (found := find_operator(text, interface)) is not None:
        operator, at = found
        if operator is Operator.UNARY_MINUS:
            return text
        text = text[:at]
    return remains_of(text)


def remains_of(text: str) -> str:
    """Return the text of an operand as it is after parsing.

    As in Linux, parsing cuts GROUP.EVENT.NAME at its dots, so that only GROUP remains.
    """
    group, _, _ = qualified(text)
    return text if group is None or is_digit(text) else group


def qualified(text: str) -> tuple[str | None, str | None, str]:
    """Split `GROUP.EVENT.NAME` into group, event and name. For any other text, group and event are None.

    A text with one dot is a name with a modifier, and is not split.
    """
    parts = text.split(".", 2)
    return (parts[0], parts[1], parts[2]) if len(parts) == 3 else (None, None, text)


def is_reference(text: str) -> bool:
    """Return True if the text refers to a variable: `$` followed by a name."""
    return len(text) >= 2 and text.startswith("$")
