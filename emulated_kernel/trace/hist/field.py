"""A field of a histogram (a key, value, variable or reference) and the computation of its value at a hit."""

from __future__ import annotations

import errno
import operator
from collections.abc import Callable, Sequence
from enum import Enum, IntFlag
from functools import cached_property, reduce

from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.events.event import EventFile
from emulated_kernel.trace.filter.fields import FilterField, FilterType
from emulated_kernel.trace.hist.attrs import HistAttrs
from emulated_kernel.trace.hist.tracing_map import DEFAULT_BITS, U64, Element, TracingMap, Value
from emulated_kernel.trace.ring.trace_clock import ns_to_usecs
from emulated_kernel.trace.ring.trace_entry import EventField, RawEntry
from emulated_kernel.trace.synth.fields import ValueType, unpack_call_chain
from emulated_kernel.trace.text.error_log import LastCommandLog
from emulated_kernel.trace.trigger.triggers import EventTriggers
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass

MAX_STRING = 256
"""Maximum size in bytes of a string value of a histogram, including its NUL.

Mirrors: include/linux/trace_events.h:MAX_FILTER_STR_VAL, kernel/trace/trace_synth.h:STR_VAR_LEN_MAX (v6.1).
"""
STACK_DEPTH = 16
"""Maximum number of callers in a call chain of a histogram."""
LATER_STACK_DEPTH = 31
"""Maximum number of callers if the interface has InterfaceRule.HIST_COMMON_STACKTRACE."""
WORD = 8
"""Size in bytes of each caller in a call chain that is a key or a variable."""
_DIV_SHIFT = 20
_PID = slice(4, 8)


class Flag(IntFlag):
    """Properties of a histogram's field.

    Mirrors: kernel/trace/trace_events_hist.c:enum hist_field_flags (v6.1).
    """

    HITCOUNT = 1 << 0
    KEY = 1 << 1
    STRING = 1 << 2
    HEX = 1 << 3
    SYM = 1 << 4
    SYM_OFFSET = 1 << 5
    EXECNAME = 1 << 6
    SYSCALL = 1 << 7
    STACKTRACE = 1 << 8
    LOG2 = 1 << 9
    TIMESTAMP = 1 << 10
    TIMESTAMP_USECS = 1 << 11
    VAR = 1 << 12
    EXPR = 1 << 13
    VAR_REF = 1 << 14
    CPU = 1 << 15
    ALIAS = 1 << 16
    BUCKET = 1 << 17
    CONST = 1 << 18
    PERCENT = 1 << 19
    GRAPH = 1 << 20
    COMM = 1 << 21
    """Name of the task in which the event occurred (Linux 7.2)."""


TIME_FLAGS = Flag.TIMESTAMP | Flag.TIMESTAMP_USECS
_SHOWN_AS_NUMBERS = Flag.HEX | Flag.SYM | Flag.SYM_OFFSET | Flag.EXECNAME | Flag.SYSCALL
"""Flags that take precedence over Flag.STACKTRACE when the `hist` file shows a key.

If a call chain has one of these flags, its first 8 bytes are shown in the format of the flag.
"""

MODIFIERS = {
    Flag.HEX: "hex",
    Flag.SYM: "sym",
    Flag.SYM_OFFSET: "sym-offset",
    Flag.EXECNAME: "execname",
    Flag.SYSCALL: "syscall",
    Flag.LOG2: "log2",
    Flag.BUCKET: "buckets",
    Flag.TIMESTAMP_USECS: "usecs",
    Flag.PERCENT: "percent",
    Flag.GRAPH: "graph",
    Flag.STACKTRACE: "stacktrace",
}
"""Flag -> name of the modifier. If a field has several of these flags, the first one is shown."""
_ANY_MODIFIER = reduce(operator.or_, MODIFIERS)


class Operator(Enum):
    """An operator of an expression. The value is the operator's text."""

    PLUS = "+"
    MINUS = "-"
    UNARY_MINUS = "-("
    DIV = "/"
    MULT = "*"


@dataclass
class HistHit:
    """A hit that is being counted in a histogram."""

    hit: ProbeHit
    entry: RawEntry
    clock: Callable[[], int]
    """Function that returns the current time in units of the trace array's clock."""
    element: Element | None = None
    references: tuple[Value, ...] = ()
    """Values of the variables to which the histogram refers, in the order of Histogram.references."""

    @cached_property
    def time(self) -> int:
        """Time of the hit in units of the trace array's clock. All fields of a histogram use this time."""
        return self.clock()

    @property
    def comm(self) -> bytes:
        """Name of the task in which the event occurred; `<idle>` for a task with pid 0.

        Mirrors: kernel/trace/trace_events_hist.c:save_comm (v6.1).
        """
        return self.entry.comm if any(self.entry.data[_PID]) else b"<idle>"


def _nothing(_hit: HistHit) -> Value:
    return 0


@dataclass(eq=False)
class HistField:
    """A field of a histogram; sizes and offsets are in bytes.

    Mirrors: kernel/trace/trace_events_hist.c:struct hist_field (v6.1).
    """

    owner: Histogram
    flags: Flag
    field: EventField | None = None
    type: str = ""
    size: int = 0
    is_signed: bool = False
    value: Callable[[HistHit], Value] = _nothing
    """Function that returns the field's value at a hit."""
    operands: tuple[HistField, ...] = ()
    operator: Operator | None = None
    name: str = ""
    """Name of an expression, or of the variable that a reference or alias refers to; "" for other fields."""
    variable: str | None = None
    """Name of the variable that the field defines, as in `ts0=...`; None if it defines no variable."""
    index: int = -1
    """Index in Element.variables of the variable that the field defines or refers to; -1 for other fields."""
    system: str | None = None
    event_name: str | None = None
    reference: int = -1
    """Index in HistHit.references of the value of a reference; -1 for other fields."""
    read_once: bool = False
    buckets: int = 0
    constant: int = 0
    offset: int = 0
    """Offset of the field's value in the compound key, if the field is a part of the key."""

    @property
    def value_type(self) -> ValueType:
        """The type of the field's values, to be compared with that of a synthetic event's field."""
        return ValueType(self.type, self.size, self.is_signed, bool(self.flags & Flag.STACKTRACE))

    def number(self, hit: HistHit) -> int:
        """Return the value at a hit as a number. Deviates: strings count as 0; Linux uses their addresses."""
        return as_number(self.value(hit))

    def full_name(self, level: int = 0) -> str:
        """Return the field's name; "" for a field without a name.

        `level`: nesting depth of the field as an operand; as in Linux, the name is "" at a depth above 1.
        Mirrors: kernel/trace/trace_events_hist.c:hist_field_name (v6.1).
        """
        if level > 1:
            return ""
        if self.field is not None:
            return self.field.name
        if self.flags & (Flag.LOG2 | Flag.ALIAS | Flag.BUCKET):
            # A call chain has no operand, even if it has a modifier.
            return self.operands[0].full_name(level + 1) if self.operands else ""
        if self.flags & Flag.CPU:
            return "common_cpu"
        if self.flags & Flag.COMM:
            return "common_comm"
        if self.flags & (Flag.EXPR | Flag.VAR_REF):
            return f"{self.system}.{self.event_name}.{self.name}" if self.system else self.name
        if self.flags & Flag.STACKTRACE:
            return self.owner.chain_name
        return "common_timestamp" if self.flags & Flag.TIMESTAMP else ""

    def modifier(self) -> str:
        """Return the field's modifier with its dot, such as `.hex`, or an empty string."""
        if not self.flags & _ANY_MODIFIER:
            return ""
        return next(f".{name}" for flag, name in MODIFIERS.items() if self.flags & flag)

    def show(self) -> str:
        """Return the field as the trigger file shows it.

        Mirrors: kernel/trace/trace_events_hist.c:hist_field_print (v6.1).
        """
        text = f"{self.variable}=" if self.variable is not None else ""
        if self.flags & Flag.CPU:
            text += "common_cpu"
        elif self.flags & Flag.COMM:
            text += "common_comm"
        elif self.flags & Flag.CONST:
            text += str(self.constant)
        else:
            if self.flags & (Flag.VAR_REF | Flag.ALIAS):
                text += "$"
            text += self.full_name()
        if not self.flags & (Flag.VAR_REF | Flag.EXPR | Flag.STACKTRACE):
            text += self.modifier()
        return f"{text}={self.buckets}" if self.buckets else text

    @property
    def is_shown_as_chain(self) -> bool:
        """Whether the `hist` file shows the field (a key) as a call chain, with a line for each caller.

        False if it is no call chain, or if it has a flag of _SHOWN_AS_NUMBERS, such as Flag.HEX.
        """
        return bool(self.flags & Flag.STACKTRACE) and not self.flags & _SHOWN_AS_NUMBERS

    def operand_text(self) -> str:
        """Return the field as an operand in the name of an expression.

        Mirrors: kernel/trace/trace_events_hist.c:expr_field_str (v6.1).
        """
        text = ""
        if self.flags & Flag.VAR_REF:
            text = "$"
        elif self.flags & Flag.CONST:
            text = str(self.constant)
        text += self.full_name()
        return text if self.flags & Flag.VAR_REF else text + self.modifier()

    def expression_text(self, level: int = 0) -> str:
        """Return the name of an expression, such as `a-$b`, or the name of a field that is no expression.

        As in Linux, the negation of a bucket, and the double negation of an expression, have no name. `level`
        is the number of negations around the field.
        Mirrors: kernel/trace/trace_events_hist.c:expr_str (v6.1).
        """
        if level > 1:
            return ""
        if not self.operands:
            return self.operand_text()
        if self.operator is Operator.UNARY_MINUS:
            inner = self.operands[0].expression_text(level + 1)
            return f"-({inner})" if inner else ""
        if self.operator is None:
            return ""
        left, right = self.operands
        return f"{left.operand_text()}{self.operator.value}{right.operand_text()}"


class Histogram:
    """Base class of histograms, with the parts that fields, actions and other histograms use."""

    def __init__(
        self, triggers: EventTriggers, file: EventFile, log: LastCommandLog, attrs: HistAttrs
    ) -> None:
        self.triggers = triggers
        self.file = file
        self.log = log
        self.attrs = attrs
        self.values: list[HistField] = []
        """Values and variables: first the hit count, then the other values, then the variables."""
        self.keys: list[HistField] = []
        """The parts of the compound key."""
        self.references: list[HistField] = []
        self.matches: list[tuple[str, str]] = []
        """Group and name of each event in the histogram's onmatch() actions."""
        self.field_variables: list[FieldVariable] = []
        self.saved_variables: list[FieldVariable] = []
        self.uses_time = False
        # Linux: up to 6.1, a call chain has no name, so no sort key can select it.
        self.chain_name = ""
        """Name that files show for the call chain of a hit, or "" in kernels without such a name."""
        self.stack_depth = STACK_DEPTH
        """Maximum number of callers in a call chain."""
        self.map = TracingMap(attrs.bits or DEFAULT_BITS, 0, 0)

    @property
    def fields(self) -> list[HistField]:
        """All fields that the histogram defines: values, variables and keys."""
        return self.values + self.keys

    def variable(self, name: str) -> HistField | None:
        """Return the variable called `name`, or None if the histogram does not define it.

        Mirrors: kernel/trace/trace_events_hist.c:find_var_field (v6.1).
        """
        for each in self.fields:
            # The name is compared first, which is faster than flags: there may be thousands of histograms.
            if each.variable == name and each.flags & Flag.VAR:
                return each
        return None

    def timestamp(self, time: int) -> int:
        """Convert a time from the clock's unit to the unit in which the histogram shows times."""
        in_usecs = self.attrs.in_usecs and self.triggers.array.clock.in_ns
        return ns_to_usecs(time) if in_usecs else time


@dataclass(frozen=True)
class FieldVariable:
    """The variable `variable`, which holds the value of `value`, a field of the histogram's event.

    Mirrors: kernel/trace/trace_events_hist.c:struct field_var (v6.1).
    """

    variable: HistField
    value: HistField


def set_variable(element: Element, variable: HistField, value: Value) -> None:
    """Set the value of a variable in a map's element. A string is truncated to the variable's size."""
    if isinstance(value, bytes) and not variable.flags & Flag.STACKTRACE:
        value = value[: max(min(variable.size, MAX_STRING) - 1, 0)]
    element.variables[variable.index] = value


def set_variables(element: Element, variables: Sequence[FieldVariable], hit: HistHit) -> None:
    """Set variables in a map's element to the values that their fields have at a hit."""
    for each in variables:
        set_variable(element, each.variable, each.value.value(hit))


def as_number(value: Value) -> int:
    """Return a value as a number, for an expression or a sum. Strings count as 0."""
    return value if isinstance(value, int) else 0


# Values of fields


def execname_value(hit: HistHit) -> Value:
    """Return the name of the task that created the hit's element; "(no comm)" if there is none yet.

    A hit has no element while the values of its keys are computed.
    """
    return hit.element.comm if hit.element is not None else b"(no comm)"


def _chain_value(field: HistField) -> Callable[[HistHit], Value]:
    """Return the function that computes the value of a call chain: WORD bytes for each caller.

    For a key that is a field of the event, the value is the call chain in this field. For all other keys, and
    for variables, it is the call chain of the hit.
    """
    owner = field.owner
    declared = field.field
    if declared is None or field.flags & Flag.VAR:
        return lambda hit: _packed(owner.triggers.array.callers(hit.hit)[: owner.stack_depth])
    place = slice(declared.offset, declared.offset + 4)
    word_size = owner.triggers.array.system.arch.word_size
    return lambda hit: _packed(unpack_call_chain(_dynamic_data(hit.entry.data, place), word_size))


def _packed(callers: Sequence[int]) -> bytes:
    return b"".join(caller.to_bytes(WORD, "little") for caller in callers)


def _dynamic_data(data: bytes, place: slice) -> bytes:
    """Return the bytes whose offset and length are in the __data_loc field at `place` of an entry."""
    location = int.from_bytes(data[place], "little")
    start = location & 0xFFFF
    length = location >> 16
    return data[start : start + length]


def _dynamic_string(data: bytes, place: slice) -> bytes:
    """Return the string whose offset and length are in the __data_loc field at `place` of an entry."""
    return _dynamic_data(data, place).partition(b"\0")[0]


def _divide(value: int, divisor: int) -> int:
    return value // divisor if divisor else U64


def divide_by_constant(value: int, divisor: int) -> int:
    """Return value / divisor as Linux computes it for a constant divisor.

    If both numbers are below 2**20 and the divisor is not a power of two, Linux multiplies by a reciprocal
    and rounds the product up.
    """
    if not divisor & (divisor - 1) or max(divisor - 1, value) >= 1 << _DIV_SHIFT:
        return value // divisor
    rounding = (1 << _DIV_SHIFT) - 1
    return value * ((1 << _DIV_SHIFT) // divisor) + rounding >> _DIV_SHIFT


Operation = Callable[..., int]
"""Function that applies an operator to numbers; only the low 64 bits of its result are used."""
OPERATIONS: dict[Operator, Operation] = {
    Operator.PLUS: operator.add,
    Operator.MINUS: operator.sub,
    Operator.MULT: operator.mul,
    Operator.UNARY_MINUS: operator.neg,
    Operator.DIV: _divide,
}


def make_field(
    owner: Histogram, source: FilterField | None, flags: Flag, variable: str | None = None
) -> HistField:
    """Create a field that is not an expression or a reference.

    `source`: field of the event, or None for a field such as the hit count. `variable`: name of the variable
    that the new field defines; None if it defines no variable.
    Raises: KernelError ENOMEM (the source field is an array of numbers, and the array's size is not 1, 2, 4
    or 8 bytes).
    Mirrors: kernel/trace/trace_events_hist.c:create_hist_field (v6.1).
    """
    field = HistField(owner, flags, source.declared if source else None, variable=variable)
    if flags & Flag.HITCOUNT:
        field.size = 8
        field.type = "u64"
        field.value = lambda _hit: 1
    elif flags & Flag.CONST:
        field.size = 8
        field.type = "u64"
        field.value = lambda _hit: field.constant
    elif flags & Flag.STACKTRACE:
        field.size = WORD * owner.stack_depth
        field.type = "unsigned long[]"
        field.value = _chain_value(field)
    elif flags & (Flag.LOG2 | Flag.BUCKET):
        operand = make_field(owner, source, flags & ~(Flag.LOG2 | Flag.BUCKET))
        if flags & Flag.LOG2:
            # Linux: the logarithm is rounded up, as by order_base_2().
            field.value = lambda hit: max(operand.number(hit) - 1, 0).bit_length()
        else:
            field.value = lambda hit: operand.number(hit) // field.buckets * field.buckets
        field.operands = (operand,)
        field.size = operand.size
        field.type = operand.type
    elif flags & Flag.TIMESTAMP:
        field.size = 8
        field.type = "u64"
        field.value = lambda hit: owner.timestamp(hit.time)
    elif flags & Flag.CPU:
        field.size = 4
        field.type = "unsigned int"
        field.value = lambda hit: hit.entry.cpu
    elif flags & Flag.COMM:
        field.size = MAX_STRING
        field.type = "char[]"
        field.value = lambda hit: hit.entry.comm
    elif source is not None:
        return _of_source(field, source)
    return field


def _of_source(field: HistField, source: FilterField) -> HistField:
    declared = source.declared
    place = slice(declared.offset, declared.offset + declared.size)
    field.type = declared.type
    field.size = declared.size
    if source.type is FilterType.STATIC_STRING:
        field.flags |= Flag.STRING
        field.value = lambda hit: hit.entry.data[place].partition(b"\0")[0]
    elif source.type is FilterType.DYN_STRING:
        field.flags |= Flag.STRING
        field.size = MAX_STRING
        field.value = lambda hit: _dynamic_string(hit.entry.data, place)
    elif source.type is FilterType.STACKTRACE:
        field.flags |= Flag.STACKTRACE
        field.size = MAX_STRING
        field.value = _chain_value(field)
    elif declared.size in (1, 2, 4, 8):
        field.is_signed = declared.is_signed
        field.value = lambda hit: (
            int.from_bytes(hit.entry.data[place], "little", signed=declared.is_signed) & U64
        )
    else:
        raise KernelError(errno.ENOMEM, f"{declared.name}: arrays of numbers cannot be counted")
    return field
