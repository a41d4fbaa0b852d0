"""Parser of the attributes in a histogram's command, such as `keys=...:vals=...:sort=...`."""

from __future__ import annotations

import errno

from emulated_kernel.trace.hist.hist_errors import HistError
from emulated_kernel.trace.hist.tracing_map import MAX_BITS, MIN_BITS, VARS_MAX
from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.trace.text.chars import SPACES
from emulated_kernel.trace.text.error_log import LastCommandLog
from emulated_kernel.trace.text.numbers import kstrtoul
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field

ACTIONS_MAX = 8
_NO_HITCOUNT = ("nohitcount", "NOHC")
_HANDLERS = ("onmatch(", "onmax(", "onchange(")


@dataclass
class HistAttrs:
    """The attributes of a histogram's command.

    Mirrors: kernel/trace/trace_events_hist.c:struct hist_trigger_attrs (v6.1).
    """

    keys: str | None = None
    vals: str | None = None
    sort: str | None = None
    name: str | None = None
    """The whole attribute `name=NAME`, including `name=`; None if the command has no name."""
    clock: str = "global"
    bits: int = 0
    pause: bool = False
    resume: bool = False
    clear: bool = False
    in_usecs: bool = False
    no_hitcount: bool = False
    """Whether the number of hits is not shown."""
    assignments: list[str] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)

    @property
    def changes(self) -> bool:
        """Whether the command pauses, continues or clears an existing histogram."""
        return self.pause or self.resume or self.clear


def split_filter(text: str) -> tuple[str, str | None]:
    """Split a command into the text before its filter, and the filter with its `if`.

    The filter begins at the first `if` with blanks around it. If the command has no filter, return the
    whole text and None.
    Raises: KernelError EINVAL (`text` begins with `if`, or the filter is empty).
    Mirrors: kernel/trace/trace_events_hist.c:event_hist_trigger_parse (v6.1).
    """
    at = text.find("if")
    while at >= 0:
        if at == 0:
            raise KernelError(errno.EINVAL, "histogram: keys are missing; add keys=FIELD")
        if text[at - 1] in " \t":
            if at >= len(text) - 3:
                raise KernelError(errno.EINVAL, "histogram: the filter after `if` is empty")
            if text[at + 2] in " \t":
                return text[: at - 1].strip(SPACES), text[at:].strip(SPACES)
        at = text.find("if", at + 1)
    return text, None


def parse_attrs(text: str, log: LastCommandLog, interface: Interface) -> HistAttrs:
    """Parse the attributes of a command, without its filter.

    Raises: KernelError EINVAL (an unknown attribute, an empty value, too many variables, no keys, or a map's
    size that is no number or out of range), ERANGE (a number is too large).
    Mirrors: kernel/trace/trace_events_hist.c:parse_hist_trigger_attrs (v6.1).
    """
    attrs = HistAttrs()
    for part in text.split(":"):
        if "=" in part:
            if part.index("=") == len(part) - 1:
                raise log.error(HistError.EMPTY_ASSIGNMENT, part)
            _assign(attrs, part, log)
        elif part in _NO_HITCOUNT and InterfaceRule.HIST_NOHITCOUNT in interface:
            attrs.no_hitcount = True
        elif part == "pause":
            attrs.pause = True
        elif part in ("cont", "continue"):
            attrs.resume = True
        elif part == "clear":
            attrs.clear = True
        elif part.startswith(_HANDLERS) and len(attrs.actions) < ACTIONS_MAX:
            attrs.actions.append(part)
        else:
            raise KernelError(errno.EINVAL, f"histogram: unknown attribute {part!r}")
    if attrs.keys is None:
        raise KernelError(errno.EINVAL, "histogram: keys are missing; add keys=FIELD")
    return attrs


def _assign(attrs: HistAttrs, part: str, log: LastCommandLog) -> None:
    name, _, value = part.partition("=")
    match name:
        case "key" | "keys":
            attrs.keys = value
        case "val" | "vals" | "values":
            attrs.vals = value
        case "sort":
            attrs.sort = value
        case "name":
            attrs.name = part
        case "clock":
            attrs.clock = value.strip(SPACES)
        case "size":
            attrs.bits = _map_bits(value)
        case _ if len(attrs.assignments) == VARS_MAX:
            raise log.error(HistError.TOO_MANY_VARS, part)
        case _:
            attrs.assignments.append(part)


def _map_bits(text: str) -> int:
    """Parse the number of a map's elements, and return its binary logarithm, rounded up.

    Mirrors: kernel/trace/trace_events_hist.c:parse_map_size (v6.1).
    """
    bits = max(kstrtoul(text) - 1, 0).bit_length()
    if not MIN_BITS <= bits <= MAX_BITS:
        raise KernelError(errno.EINVAL, f"histogram: the size {text} is out of range; use 128 to 131072")
    return bits


def parse_variables(attrs: HistAttrs, log: LastCommandLog) -> list[tuple[str, str]]:
    """Return name and expression of each variable that the command defines.

    Raises: KernelError EINVAL (a variable has no value, or there are too many variables).
    Mirrors: kernel/trace/trace_events_hist.c:parse_var_defs (v6.1).
    """
    found: list[tuple[str, str]] = []
    for assignment in attrs.assignments:
        for part in assignment.split(",")[:VARS_MAX]:
            name, equals, expression = part.partition("=")
            if not equals:
                raise log.error(HistError.MALFORMED_ASSIGNMENT, name)
            if len(found) == VARS_MAX:
                raise log.error(HistError.TOO_MANY_VARS, name)
            found.append((name, expression))
    return found
