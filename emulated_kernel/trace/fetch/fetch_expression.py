"""Parser of the expressions of fetch arguments, which compiles them to operations.

Mirrors: kernel/trace/trace_probe.c:parse_probe_arg (v6.1).
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.trace.fetch.fetch_context import FetchContext
from emulated_kernel.trace.fetch.fetch_insn import FetchInsn, FetchOp
from emulated_kernel.trace.interface import InterfaceRule
from emulated_kernel.trace.text.chars import is_good_name
from emulated_kernel.trace.text.numbers import is_digit, kstrtol, kstrtoul
from emulated_kernel.trace.text.probe_errors import ProbeError
from emulated_kernel.util.errors import KernelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.trace.fetch.named_args import NamedArgs

_MAX_NESTED = 8
"""Maximum nesting depth of dereferences, typecasts and accesses to per-CPU variables in an argument.

Mirrors: kernel/trace/trace_probe.h:TRACEPROBE_MAX_NESTED_LEVEL (v7.3).
"""
_PER_CPU = {"this_cpu_ptr(": False, "this_cpu_read(": True}
"""Start of an access to a per-CPU variable -> True if the access loads the value, False if the address."""
FETCH_INSN_MAX = 16
"""Maximum number of operations of a fetch program, including its end."""
PARAM_MAX_STACK = 2048
"""Maximum N of $stackN and $argN, which is the number of words in a kernel stack."""
COMM_NAMES = ("comm", "COMM")
"""Names of the variable with the current task's name."""
_NumberParser = Callable[[str, int, int], int]


def argument_insn(arch: Arch, number: int) -> FetchInsn:
    """Return the operation that loads function argument `number`, counted from 0, at a function's entry.

    Mirrors: arch/*/include/asm/ptrace.h:regs_get_kernel_argument (v6.1).
    """
    registers = arch.registers
    beyond = number - len(registers.arguments)
    if beyond < 0:
        return FetchInsn(FetchOp.REG, name=registers.arguments[number])
    return FetchInsn(FetchOp.ARG) if registers.link else FetchInsn(FetchOp.STACK, value=beyond + 1)


class ExpressionParser:
    """Parser of the expression of one argument.

    `offset` is the column of the argument's expression in the command's word, for carets in error_log. In the
    methods, `at` is the column of the parsed text in the expression.
    """

    def __init__(self, context: FetchContext, offset: int) -> None:
        self._context = context
        self._arch = context.arch
        self._offset = offset
        self._bits = 8 * context.arch.word_size
        self._rules = context.interface.rules
        self._depth = 0
        """Number of dereferences, typecasts and per-CPU accesses around the current expression."""
        self.named: NamedArgs | None = None
        """The NamedArgs object that gave the value its BTF type; None if the value has no BTF type."""
        self.end = 0
        """Column for errors that are found after the parsing.

        This is the column of the last field, or of the operand of the outermost dereference; 0 if there is
        neither.
        """

    def compile(self, text: str, at: int) -> list[FetchInsn]:
        """Compile `text`, an expression without its type, and return the operations.

        Set the attributes `named` and `end`.
        Raises: KernelError EINVAL (malformed, or not allowed for this probe), ERANGE (a number is too large),
        E2BIG (nested too deeply), ENOENT (a name is unknown), EOPNOTSUPP (no BTF, or an unsupported form);
        all are logged.
        """
        if InterfaceRule.TYPECASTS in self._rules:
            return self._nested(text, at)
        return self._innermost(text, at)

    def error(self, column: int, error: ProbeError, code: int = errno.EINVAL) -> KernelError:
        """Log an error, and return the exception to raise.

        `column`: column of the error, from the start of the argument's expression. `code`: errno of the
        exception.
        """
        return self._context.log.error(self._offset + column, error, code)

    def _nested(self, text: str, at: int) -> list[FetchInsn]:
        """Compile the expression `text`, which may contain other expressions as operands.

        Precondition: the interface has InterfaceRule.TYPECASTS.
        Mirrors: kernel/trace/trace_probe.c:parse_probe_arg_nested (v7.3).
        """
        per_cpu = next((begin for begin in _PER_CPU if text.startswith(begin)), None)
        if per_cpu is None and text[:1] not in ("+", "-", "("):
            if self._context.on_event and is_good_name(text[:1]):
                return [self._field_by_name(text, at)]
            return self._innermost(text, at)
        if self._depth >= _MAX_NESTED:
            raise self.error(at, ProbeError.TOO_MANY_NESTED, errno.E2BIG)
        self._depth += 1
        if per_cpu is not None:
            code = self._of_cpu(text, at, per_cpu)
        else:
            code = self._typecast(text, at) if text[0] == "(" else self._dereference(text, at)
        self._depth -= 1
        return code

    def _field_by_name(self, name: str, at: int) -> FetchInsn:
        """Compile `name`, which must be the name of a field of an event probe's target event."""
        has_field = self._context.has_field
        if has_field is None or not has_field(name):
            raise self.error(at, ProbeError.NO_EVENT_FIELD)
        return FetchInsn(FetchOp.TP_ARG, name=name)

    def _of_cpu(self, text: str, at: int, begin: str) -> list[FetchInsn]:
        """Compile `this_cpu_ptr(EXPR)` or `this_cpu_read(EXPR)`, which starts with `begin`."""
        if self._context.on_event or not self._context.in_kernel:
            raise self.error(at, ProbeError.NOSUP_PERCPU)
        at += len(begin)
        inner, closed, _ = text[len(begin) :].rpartition(")")
        if not closed:
            raise self.error(at + len(text) - len(begin), ProbeError.DEREF_OPEN_BRACE)
        code = self.compile(inner, at)
        self._check_pointer(code, at)
        if inner.startswith("@"):
            code.pop()
        code = self._extended(code, FetchInsn(FetchOp.CPU_PTR), at)
        return self._extended(code, FetchInsn(FetchOp.DEREF), at) if _PER_CPU[begin] else code

    def _typecast(self, text: str, at: int) -> list[FetchInsn]:
        """Compile `(STRUCTURE)EXPR->FIELDS` or `(STRUCTURE,MEMBER)EXPR->FIELDS`.

        Mirrors: kernel/trace/trace_probe.c:handle_typecast (v7.3).
        """
        context = self._context
        if not (context.on_event or context.has_parameters):
            raise self.error(at, ProbeError.NOSUP_BTFARG, errno.EOPNOTSUPP)
        cast, closed, rest = text.partition(")")
        if not closed:
            raise self.error(at + len(text), ProbeError.DEREF_OPEN_BRACE)
        start = at + len(cast) + 1
        end, skipped = self._operand(rest, start)
        fields = end + skipped + 2
        code = self.compile(rest[skipped:end], start + skipped)
        return self._names().cast_value(
            context.btf, (cast[1:], at + 1), code, (rest[fields:], start + fields)
        )

    def _operand(self, text: str, at: int) -> tuple[int, int]:
        """Find the operand of a typecast, which is followed by `->FIELDS`.

        `text`: the text after the typecast. Return (end, skipped). If the operand is in parentheses,
        `skipped` is 1, and `end` is the index of the closing parenthesis. Otherwise `skipped` is 0, and
        `end` is the index after the operand.
        """
        if text.startswith("("):
            end, skipped = _closing(text, 0), 1
            if end < 0:
                raise self.error(at, ProbeError.DEREF_OPEN_BRACE)
        elif text[:1] in ("+", "-") or text.startswith(tuple(_PER_CPU)):
            begin = text.find("(", 1)
            if begin < 0:
                raise self.error(at, ProbeError.DEREF_NEED_BRACE)
            end, skipped = _closing(text, begin) + 1, 0
            if not end:
                raise self.error(at + len(text), ProbeError.DEREF_OPEN_BRACE)
        else:
            sign = min((at for at in (text.find("+"), text.find("-")) if at >= 0), default=-1)
            if text.startswith("@") and sign >= 0 and is_digit(text, sign + 1):
                raise self.error(at, ProbeError.TYPECAST_SYM_OFFSET)
            end, skipped = text.find("-"), 0
            if end < 0 or text[end + 1 : end + 2] != ">":
                raise self.error(at + len(text), ProbeError.TYPECAST_REQ_FIELD)
        if text[end + skipped : end + skipped + 2] != "->":
            raise self.error(at + end + skipped, ProbeError.TYPECAST_REQ_FIELD)
        return end, skipped

    def _innermost(self, text: str, at: int) -> list[FetchInsn]:
        match text[:1]:
            case "$":
                return self._variable(text[1:], at)
            case "%":
                return [self._register(text[1:], at)]
            case "@":
                return self._memory(text[1:], at)
            case "+" | "-":
                return self._dereference(text, at)
            case "\\":
                return [self._immediate(text[1:], at)]
            case "(" if InterfaceRule.EVENT_TYPECASTS in self._rules:
                return self._cast(text, at)
        if InterfaceRule.BTF_ARGS in self._rules and is_good_name(text[:1]):
            return self._by_name(text, at)
        raise self.error(at, ProbeError.BAD_FETCH_ARG)

    def _names(self) -> NamedArgs:
        """Create a NamedArgs object, store it as `named`, and return it.

        The object compiles the names of parameters and fields, and will hold the BTF type of the value.
        """
        from emulated_kernel.trace.fetch.named_args import NamedArgs

        context = self._context
        first = context.first_parameter
        self.named = NamedArgs(
            context.prototype, lambda index: self._parameter(index + first), self.error, FETCH_INSN_MAX - 1
        )
        return self.named

    def _by_name(self, text: str, at: int) -> list[FetchInsn]:
        context = self._context
        if not context.has_parameters:
            raise self.error(at, ProbeError.NOSUP_BTFARG)
        if context.btf is None:
            raise self.error(at, ProbeError.NOSUP_BTFARG, errno.EOPNOTSUPP)
        return self._names().named(text, at)

    def _cast(self, text: str, at: int) -> list[FetchInsn]:
        """Compile `(STRUCTURE)NAME->FIELD`, in which NAME is a field of an event probe's target event."""
        context = self._context
        if context.has_field is None:
            raise self.error(at, ProbeError.TYPECAST_NOT_EVENT)
        structure, closed, inner = text[1:].partition(")")
        if not closed:
            raise self.error(at + len(text), ProbeError.DEREF_OPEN_BRACE)
        at += len(structure) + 2
        return self._names().cast(context.btf, structure, inner, at, context.has_field)

    def _return_value(self, text: str, at: int) -> list[FetchInsn]:
        """Compile `$retval`, with its BTF type and fields if this version of Linux supports them.

        `text` begins with `$`.
        """
        if not self._context.on_return:
            raise self.error(at, ProbeError.RETVAL_ON_PROBE)
        load = FetchInsn(FetchOp.RETVAL, name=self._arch.registers.return_value)
        is_typed = InterfaceRule.BTF_ARGS in self._rules and self._context.in_kernel
        if not is_typed or self._context.btf is None:
            return [load]
        return self._names().return_value(load, text, at)

    def _parameter(self, number: int) -> FetchInsn:
        """Return the operation that loads function argument `number`, counted from 0.

        In a return probe, the operation loads the value that was stored at the function's entry.
        """
        if not self._context.on_return:
            return argument_insn(self._arch, number)
        captured = self._context.captured
        if number not in captured:
            captured.append(number)
        return FetchInsn(FetchOp.EDATA, value=captured.index(number))

    def _variable(self, name: str, at: int) -> list[FetchInsn]:
        context = self._context
        if context.on_event:
            return [self._event_field(name, at)]
        if name.startswith("retval") and (name == "retval" or InterfaceRule.BTF_ARGS in self._rules):
            return self._return_value("$" + name, at)
        if name.startswith("current") and InterfaceRule.CURRENT_TASK in self._rules and context.in_kernel:
            if name == "current":
                return [FetchInsn(FetchOp.CURRENT)]
            if name.startswith("current-"):
                return self._names().current(context.btf, "$" + name, at)
        return [self._special(name, at)]

    def _event_field(self, name: str, at: int) -> FetchInsn:
        """Compile `$FIELD` of an event probe; `name` is FIELD.

        In Linux up to 6.1, the field is looked up later, so any name is accepted here.

        Mirrors: kernel/trace/trace_probe.c:parse_probe_vars (v6.12).
        """
        has_field = self._context.has_field
        if InterfaceRule.LATE_CHECKS in self._rules and has_field is not None and not has_field(name):
            if name not in COMM_NAMES:
                raise self.error(at, ProbeError.BAD_VAR)
            return FetchInsn(FetchOp.COMM)
        return FetchInsn(FetchOp.TP_ARG, name=name)

    def _special(self, name: str, at: int) -> FetchInsn:
        """Compile the variable `$stack`, `$stackN`, `$comm` or `$argN`; `name` is its name without `$`."""
        context = self._context
        if name == "stack":
            return FetchInsn(FetchOp.STACKP, name=self._arch.registers.sp)
        if name.startswith("stack") and is_digit(name, 5):
            number = self._number_of(name[5:], at)
            if context.in_kernel and number > PARAM_MAX_STACK:
                raise self.error(at, ProbeError.BAD_STACK_NUM)
            return FetchInsn(FetchOp.STACK, value=number)
        if name in COMM_NAMES:
            return FetchInsn(FetchOp.COMM)
        is_late = InterfaceRule.LATE_CHECKS in self._rules
        if name.startswith("arg") and (context.has_parameters or is_late):
            number = self._number_of(name[3:], at)
            if not 0 < number <= PARAM_MAX_STACK:
                raise self.error(at, ProbeError.BAD_ARG_NUM)
            if not context.has_parameters:
                raise self.error(at, ProbeError.NOFENTRY_ARGS)
            return self._parameter(number - 1 + context.first_parameter)
        raise self.error(at, ProbeError.BAD_VAR)

    def _number_of(self, digits: str, at: int) -> int:
        try:
            return kstrtoul(digits, 10, self._bits)
        except KernelError:
            raise self.error(at, ProbeError.BAD_VAR) from None

    def _register(self, name: str, at: int) -> FetchInsn:
        no_registers = self._context.on_event or self._context.in_fprobe
        if no_registers:
            refused = self.error(at, ProbeError.BAD_VAR)
            if InterfaceRule.TYPECASTS in self._rules:
                raise refused
            # Linux continues after the first error, finds that nothing was fetched, and logs a second error.
            raise self.error(at, ProbeError.BAD_FETCH_ARG)
        attribute = self._arch.registers.names.get(name)
        if attribute is None:
            raise self.error(at, ProbeError.BAD_REG_NAME)
        return FetchInsn(FetchOp.REG, name=attribute)

    def _memory(self, place: str, at: int) -> list[FetchInsn]:
        dereference = FetchInsn(FetchOp.DEREF)
        if is_digit(place):
            address = self._logged(kstrtoul, place, at, ProbeError.BAD_MEM_ADDR)
            return [FetchInsn(FetchOp.IMM, value=address), dereference]
        if place.startswith("+"):
            return [self._file_offset(place[1:], at), dereference]
        if not self._context.in_kernel:
            raise self.error(at, ProbeError.SYM_ON_UPROBE)
        return [FetchInsn(FetchOp.SYMBOL, name=place), FetchInsn(FetchOp.IMM), dereference]

    def _file_offset(self, number: str, at: int) -> FetchInsn:
        if self._context.in_kernel:
            raise self.error(at, ProbeError.FILE_ON_KPROBE)
        offset = self._logged(kstrtol, number, at, ProbeError.BAD_FILE_OFFS)
        return FetchInsn(FetchOp.FOFFS, value=offset)

    def _dereference(self, text: str, at: int) -> list[FetchInsn]:
        """Compile a dereference, `+|-[u]OFFS(EXPR)`.

        Linux: the carets of errors inside `+u0(...)` and `+-8(...)` are one column early.
        """
        op = FetchOp.DEREF
        if text[1:2] == "u":
            op = FetchOp.UDEREF
            text = text[0] + text[2:]
        text = text.removeprefix("+")
        number, brace, inner = text.partition("(")
        if not brace:
            raise self.error(at, ProbeError.DEREF_NEED_BRACE)
        offset = self._logged(kstrtol, number, at, ProbeError.BAD_DEREF_OFFS)
        at += len(number) + (1 if text[0] == "-" else 2)
        if ")" not in inner:
            raise self.error(at + len(inner), ProbeError.DEREF_OPEN_BRACE)
        code = self.compile(inner.rpartition(")")[0], at)
        self._check_pointer(code, at)
        return self._extended(code, FetchInsn(op, value=_as_int(offset)), at)

    def _check_pointer(self, code: list[FetchInsn], at: int) -> None:
        """Check that the value of `code` can be a pointer. `at`: column of the value's expression.

        Raises: KernelError EINVAL (the value is a string; logged).
        """
        if code[-1].op in (FetchOp.COMM, FetchOp.DATA):
            raise self.error(at, ProbeError.COMM_CANT_DEREF)

    def _extended(self, code: list[FetchInsn], insn: FetchInsn, at: int) -> list[FetchInsn]:
        """Return `code` followed by the operation `insn`, after which the value has no BTF type.

        `at`: column for errors.
        Raises: KernelError EINVAL (too many operations; logged).
        """
        self.end = at
        self.named = None
        if len(code) == FETCH_INSN_MAX - 1:
            raise self.error(at, ProbeError.TOO_MANY_OPS)
        return [*code, insn]

    def _immediate(self, text: str, at: int) -> FetchInsn:
        if text.startswith('"'):
            body = text[1:]
            if not body.endswith('"'):
                raise self.error(at + 2 + len(body), ProbeError.IMMSTR_NO_CLOSE)
            return FetchInsn(FetchOp.DATA, data=body[:-1].encode("latin-1"))
        value = self._logged(_str_to_immediate, text, at + 1, ProbeError.BAD_IMM)
        return FetchInsn(FetchOp.IMM, value=value & (1 << self._bits) - 1)

    def _logged(self, parse: _NumberParser, text: str, at: int, error: ProbeError) -> int:
        """Parse a number with the function `parse`.

        If that fails, log `error` at column `at`, and raise the exception with the errno of the failure.
        """
        try:
            return parse(text, 0, self._bits)
        except KernelError as failure:
            raise self.error(at, error, failure.errno) from None


def _closing(text: str, begin: int) -> int:
    """Return the position of the parenthesis that closes the one at `begin`, or -1 if none does.

    Mirrors: kernel/trace/trace_probe.c:find_matched_close_paren (v7.3).
    """
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at
    return -1


def _str_to_immediate(text: str, base: int, bits: int) -> int:
    """Parse `text`, the number of an immediate value, which follows a backslash.

    `base`: 0 means that a prefix selects the base. `bits`: size of the number.

    Raises: KernelError EINVAL (not a number), ERANGE (too large).
    Mirrors: kernel/trace/trace_probe.c:str_to_immediate (v6.1).
    """
    if is_digit(text):
        return kstrtoul(text, base, bits)
    if text[:1] in ("-", "+"):
        return kstrtol(text.removeprefix("+"), base, bits)
    raise KernelError(errno.EINVAL, "not an immediate value")


def _as_int(offset: int) -> int:
    """Return a dereference's offset truncated to a signed 32-bit integer, as Linux stores it."""
    return ((offset + (1 << 31)) & 0xFFFFFFFF) - (1 << 31)
