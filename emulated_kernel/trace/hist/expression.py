"""Parser of histogram expressions: fields with modifiers, constants, references, and operators."""

from __future__ import annotations

import errno

from emulated_kernel.trace.filter.fields import FilterField, FilterType, find_event_field
from emulated_kernel.trace.hist.field import (
    OPERATIONS,
    TIME_FLAGS,
    Flag,
    HistField,
    Operation,
    Operator,
    divide_by_constant,
    make_field,
)
from emulated_kernel.trace.hist.hist_errors import HistError
from emulated_kernel.trace.hist.operators import find_operator, is_reference, qualified
from emulated_kernel.trace.hist.tracing_map import U64
from emulated_kernel.trace.hist.variables import Variables
from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.synth.synth_event import SyntheticEvent
from emulated_kernel.trace.text.numbers import is_digit, kstrtoul
from emulated_kernel.util.errors import KernelError

_SUBEXPRESSIONS_MAX = 3
_GENERIC_CHAINS = ("stacktrace", "STACKTRACE")
"""Names of the call chain of a hit, if the event has no field of this name."""
_PLAIN_MODIFIERS = {
    "hex": Flag.HEX,
    "sym": Flag.SYM,
    "symXoffset": Flag.SYM_OFFSET,
    "syscall": Flag.SYSCALL,
    "log2": Flag.LOG2,
    "usecs": Flag.TIMESTAMP_USECS,
}


class ExpressionParser:
    """Parser of the expression of one key, value or variable.

    In the methods, `flags` are Flag bits for the new field. `variable` is the name of the variable that the
    expression defines; None if it defines no variable.
    Mirrors: kernel/trace/trace_events_hist.c:parse_expr, parse_unary, parse_atom (v6.1).
    """

    def __init__(self, variables: Variables) -> None:
        self._variables = variables
        self._owner = variables.owner
        self._log = variables.log
        self._subexpressions = 0

    def parse(self, text: str, flags: Flag, variable: str | None = None) -> HistField:
        """Parse an expression and return its field.

        `flags`: Flag bits for the field. `variable`: name of the variable that the expression defines; None
        if it defines no variable.
        Raises: KernelError EINVAL (malformed, or a name is unknown), ENOMEM (see make_field()), EDOM
        (division by 0).
        """
        if self._subexpressions > _SUBEXPRESSIONS_MAX:
            raise self._log.error(HistError.TOO_MANY_SUBEXPR, text)
        found = find_operator(text, self._variables.interface)
        if found is None:
            return self.atom(text, flags, variable)
        operator, at = found
        if operator is Operator.UNARY_MINUS:
            return self._unary(text, flags, variable)
        self._subexpressions += 1
        left = text[:at]
        right = text[at + 1 :]
        if not left or not right:
            raise KernelError(errno.EINVAL, f"histogram: {text!r} lacks an operand")
        return self._binary(operator, left, right, flags, variable)

    def _unary(self, text: str, flags: Flag, variable: str | None) -> HistField:
        """Parse `-(EXPRESSION)` and return its field.

        As in Linux, one character after the sign is skipped, even if it is not a parenthesis.
        """
        self._subexpressions += 1
        if self._subexpressions > _SUBEXPRESSIONS_MAX:
            raise self._log.error(HistError.TOO_MANY_SUBEXPR, text)
        body = text[1:]
        if "(" not in body:
            raise KernelError(errno.EINVAL, f"histogram: {text!r}: unary minus needs parentheses")
        inner, closing, rest = body[1:].rpartition(")")
        if not closing:
            raise KernelError(errno.EINVAL, f"histogram: {text!r}: a closing parenthesis is missing")
        if rest:
            raise self._log.error(HistError.UNARY_MINUS_SUBEXPR, body[1:])
        operand = self._operand(inner)
        flags |= operand.flags & TIME_FLAGS
        return self._expression(
            Operator.UNARY_MINUS, OPERATIONS[Operator.UNARY_MINUS], (operand,), flags, variable
        )

    def _operand(self, text: str) -> HistField:
        operand = self.parse(text, Flag(0))
        if operand.flags & Flag.STRING:
            raise self._log.error(HistError.INVALID_STR_OPERAND, text)
        return operand

    def _expression(
        self,
        operator: Operator,
        operation: Operation,
        operands: tuple[HistField, ...],
        flags: Flag,
        variable: str | None,
    ) -> HistField:
        """Create the field of an operation. The field has the type of the first operand."""
        like = operands[0]
        field = HistField(
            self._owner, flags | Flag.EXPR, type=like.type, size=like.size, is_signed=like.is_signed
        )
        field.operator = operator
        field.operands = operands
        field.variable = variable
        field.value = lambda hit: operation(*[each.number(hit) for each in operands]) & U64
        field.name = field.expression_text()
        return field

    def _binary(
        self, operator: Operator, left_text: str, right_text: str, flags: Flag, variable: str | None
    ) -> HistField:
        left = self._operand(left_text)
        right = self._operand(right_text)
        origin = self._variables.origin(left)
        divisor = self._variables.origin(right)
        if (origin.flags ^ divisor.flags) & Flag.TIMESTAMP_USECS:
            raise self._log.error(HistError.TIMESTAMP_MISMATCH)
        flags |= left.flags & TIME_FLAGS
        left.read_once = True
        right.read_once = True
        operation = OPERATIONS[operator]
        if operator is Operator.DIV and divisor.flags & Flag.CONST:
            if not divisor.constant:
                raise self._log.error(HistError.DIVISION_BY_ZERO, right_text, errno.EDOM)
            operation = divide_by_constant
        if origin.flags & divisor.flags & Flag.CONST:
            return self._constant(operation(origin.constant, divisor.constant) & U64, flags, variable)
        return self._expression(operator, operation, (left, right), flags, variable)

    def _constant(self, value: int, flags: Flag, variable: str | None) -> HistField:
        field = make_field(self._owner, None, flags | Flag.CONST, variable)
        field.constant = value
        return field

    # Atoms

    def atom(self, text: str, flags: Flag, variable: str | None = None) -> HistField:
        """Parse a constant, `[GROUP.EVENT.]$VARIABLE` or a field's name, and return the histogram's field.

        Raises: KernelError EINVAL (malformed, or a name is unknown), ENOMEM (see make_field()).
        """
        if is_digit(text) and InterfaceRule.HIST_ARITHMETIC in self._variables.interface:
            try:
                return self._constant(kstrtoul(text), flags, variable)
            except KernelError:
                raise self._log.error(HistError.EXPECT_NUMBER, text) from None
        system, event_name, name = qualified(text)
        local = self._variables.local_expression(system, event_name, name)
        if local is None and is_reference(name):
            reference = self._variables.reference(system, event_name, name)
            if reference is not None:
                return self._alias(reference, variable) if variable is not None else reference
        source, flags, buckets = self._field(local or name, flags)
        field = make_field(self._owner, source, flags, variable)
        field.buckets = buckets
        return field

    def _alias(self, reference: HistField, variable: str) -> HistField:
        """Create a variable that is another name for the variable that `reference` names.

        Mirrors: kernel/trace/trace_events_hist.c:create_alias (v6.1).
        """
        alias = HistField(self._owner, Flag.ALIAS | Flag.VAR, variable=variable, operands=(reference,))
        alias.value = reference.value
        self._variables.copy(reference, alias)
        return alias

    def _field(self, text: str, flags: Flag) -> tuple[FilterField | None, Flag, int]:
        """Parse a field's name and modifier, and return the event's field, the flags, and the bucket size.

        The event's field is None for common_timestamp, common_cpu, common_comm and the hit's call chain. The
        bucket size is 0 without the modifier `buckets`.
        Mirrors: kernel/trace/trace_events_hist.c:parse_field (v6.1).
        """
        name, dot, modifier = text.partition(".")
        buckets = 0
        has_chains = InterfaceRule.HIST_COMMON_STACKTRACE in self._variables.interface
        is_chain = has_chains and modifier == "stacktrace"
        if is_chain:
            flags |= Flag.STACKTRACE
        elif dot:
            added, buckets = self._modifier(name, modifier, flags)
            flags |= added
        source, flags = self._source(name, flags, has_chains=has_chains)
        if is_chain and (source is None or source.type is not FilterType.STACKTRACE):
            raise self._log.error(HistError.BAD_FIELD_MODIFIER, text)
        return source, flags, buckets

    def _source(self, name: str, flags: Flag, *, has_chains: bool) -> tuple[FilterField | None, Flag]:
        """Return (field, flags) for the value called `name`.

        The field is None for common_timestamp, common_cpu, common_comm, and the hit's call chain.
        `has_chains`: whether call chains can be values; otherwise their names are unknown.
        """
        if name == "common_timestamp":
            self._owner.uses_time = True
            if flags & Flag.TIMESTAMP_USECS:
                self._owner.attrs.in_usecs = True
            return None, flags | Flag.TIMESTAMP
        if name == "common_cpu":
            return None, flags | Flag.CPU
        has_comm = InterfaceRule.HIST_COMMON_COMM in self._variables.interface
        if name == "common_comm" and has_comm:
            return None, flags | Flag.COMM | Flag.STRING
        if name == "common_stacktrace" and has_chains:
            return None, flags | Flag.STACKTRACE
        event = self._owner.file.event
        source = find_event_field(event.fields, name)
        if has_chains:
            if source is None and name in _GENERIC_CHAINS:
                return None, flags | Flag.STACKTRACE
            if source is not None and isinstance(event, SyntheticEvent) and event.is_call_chain(name):
                return FilterField(FilterType.STACKTRACE, source.declared), flags
        if source is not None and source.type is FilterType.CPU:
            return source, flags | Flag.CPU
        if source is not None and source.type is FilterType.COMM and has_comm:
            return source, flags | Flag.COMM | Flag.STRING
        if source is None or not source.declared.size:
            raise self._log.error(HistError.FIELD_NOT_FOUND, name)
        return source, flags

    def _modifier(self, name: str, modifier: str, flags: Flag) -> tuple[Flag, int]:
        """Return the flag of `modifier` after the field `name`, and the bucket size (0 without `buckets`).

        As in Linux, any text that begins with `percent` or `graph` is accepted as that modifier.
        """
        if modifier in _PLAIN_MODIFIERS:
            return _PLAIN_MODIFIERS[modifier], 0
        if modifier == "execname" and name == "common_pid":
            return Flag.EXECNAME, 0
        interface = self._variables.interface
        if modifier.startswith("bucket") and InterfaceRule.HIST_BUCKETS in interface:
            return Flag.BUCKET, self._buckets(modifier.removeprefix("bucket").removeprefix("s"))
        if not flags & (Flag.VAR | Flag.KEY) and InterfaceRule.HIST_ARITHMETIC in interface:
            if modifier.startswith("percent"):
                return Flag.PERCENT, 0
            if modifier.startswith("graph"):
                return Flag.GRAPH, 0
        raise self._log.error(HistError.BAD_FIELD_MODIFIER, modifier)

    def _buckets(self, text: str) -> int:
        """Parse `=SIZE`, which follows the modifier `buckets`, and return the size.

        As in Linux, the caret points at the part of the modifier that was not yet read.
        """
        if not text.startswith("="):
            raise self._log.error(HistError.BAD_FIELD_MODIFIER, text)
        try:
            size = kstrtoul(text[1:])
        except KernelError:
            size = 0
        if not size:
            raise self._log.error(HistError.BAD_FIELD_MODIFIER, text[1:])
        return size
