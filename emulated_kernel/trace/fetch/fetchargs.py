"""Parser of fetch arguments, which compiles [NAME=]EXPRESSION[:TYPE] to a fetch program."""

from __future__ import annotations

import errno
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.kprobes.sight import Sight
from emulated_kernel.trace.fetch.expand_args import expand_args
from emulated_kernel.trace.fetch.fetch_insn import FetchInsn, FetchOp, FetchProgram, FetchStages
from emulated_kernel.trace.fetch.fetch_types import FetchType, bitfield_of, find_fetch_type
from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.trace.text.chars import is_good_name
from emulated_kernel.trace.text.error_log import ErrorLog
from emulated_kernel.trace.text.numbers import is_digit, kstrtol, kstrtoul
from emulated_kernel.trace.text.probe_errors import ProbeError, TraceProbeLog
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.fast_dataclass import dataclass, field

TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.image.linux.btf import Btf
    from emulated_kernel.trace.fetch.btf_args import ProbedFunction
    from emulated_kernel.trace.fetch.named_args import NamedArgs

MAX_TRACE_ARGS = 128
"""Maximum number of arguments of an event."""
MAX_ARG_NAME_LEN = 32
"""Maximum length of an argument's name in bytes."""
MAX_ARGSTR_LEN = 63
"""Maximum length of an argument's expression and type in bytes."""
_LONG_ARGSTR_LEN = 255
"""Value of MAX_ARGSTR_LEN since Linux 7.3."""
_MAX_NESTED = 8
"""Maximum nesting depth of dereferences, typecasts and accesses to per-CPU variables in an argument.

Mirrors: kernel/trace/trace_probe.h:TRACEPROBE_MAX_NESTED_LEVEL (v7.3).
"""
_PER_CPU = {"this_cpu_ptr(": False, "this_cpu_read(": True}
"""Start of an access to a per-CPU variable -> whether the access reads the variable."""
MAX_ARRAY_LEN = 64
"""Maximum number of elements of an array."""
MAX_PROBE_EVENT_SIZE = 3072
"""Maximum size of all arguments in the fixed part of an entry, in bytes."""
FETCH_INSN_MAX = 16
"""Maximum number of operations of a fetch program, including its end."""
PARAM_MAX_STACK = 2048
"""Maximum N of $stackN and $argN, which is the number of words in a kernel stack."""

COMM_NAMES = ("comm", "COMM")
"""Names of the variable with the current task's name."""
RESERVED_NAMES = frozenset(
    {
        "common_type",
        "common_flags",
        "common_preempt_count",
        "common_pid",
        "common_tgid",
        "__probe_ip",
        "__probe_ret_ip",
        "__probe_func",
    }
)
_RULES_BY_FUNCTION = frozenset({InterfaceRule.BTF_ARGS, InterfaceRule.META_ARGS, InterfaceRule.ENTRY_ARGS})
"""Rules under which the same text can mean different arguments for different functions."""
_ARRAY_STORES = frozenset({FetchOp.ST_MEM, FetchOp.ST_STRING, FetchOp.ST_USTRING})
_NumberParser = Callable[[str, int, int], int]


def no_types() -> None:
    """Return None: the default of FetchContext.types, for a kernel without BTF."""


@dataclass(frozen=True)
class ProbeArg:
    """A compiled fetch argument of an event."""

    name: str
    expression: str
    """Expression and type of the argument as written, which kprobe_events shows."""
    type: FetchType
    count: int
    """Number of array elements; 0 if the argument is not an array."""
    offset: int
    """Offset of the argument from the first argument in the fixed part of an entry, in bytes."""
    stages: FetchStages

    @property
    def size(self) -> int:
        """Size of the argument in the fixed part of an entry, in bytes."""
        return self.type.size * (self.count or 1)

    @property
    def field_type(self) -> str:
        """The C type of the argument in the format file's `field:` line."""
        return f"{self.type.field_type}[{self.count}]" if self.count else self.type.field_type


def sight_of(arg: ProbeArg) -> Sight:
    """Return the kind of data that an argument reads about the system call in which its probe is hit."""
    stages = arg.stages
    source = stages.load.op
    if source in (FetchOp.COMM, FetchOp.DATA):
        return Sight.NOTHING
    if stages.derefs or stages.pointer is not None or stages.store.op is not FetchOp.ST_RAW:
        return Sight.MEMORY
    if source in (FetchOp.IMM, FetchOp.ARG):
        return Sight.NOTHING
    is_register = source in (FetchOp.REG, FetchOp.STACKP, FetchOp.RETVAL)
    return Sight.REGISTERS if is_register else Sight.MEMORY


@dataclass(frozen=True, eq=False)
class FetchContext:
    """Properties of the probe or event whose arguments are parsed; they determine the allowed expressions."""

    arch: Arch
    log: TraceProbeLog
    interface: Interface
    on_return: bool = False
    on_entry: bool = False
    in_kernel: bool = True
    """Whether the probe is in the kernel. If it is in a program, expressions name file offsets."""
    finish: Callable[[ProbeArg], ProbeArg] | None = None
    """For event probes: resolves the event's field that an argument names, after the argument is parsed."""
    in_fprobe: bool = False
    """Whether the probe is an fprobe or on a tracepoint, so that registers have no names."""
    types: Callable[[], Btf | None] = no_types
    """Returns the kernel's BTF, or None if the kernel has none."""
    function: str | None = None
    """Name of the probed function, or None if the probe is not at a symbol."""
    first_parameter: int = 0
    """Number of leading parameters of the function that no argument can name.

    In a distribution's kernel, a tracepoint's function has such a parameter: `__data`, before the arguments
    of the tracepoint.
    """
    captured: list[int] = field(default_factory=list)
    """Numbers of the function arguments that a return probe stores at the function's entry, in this order."""

    has_field: Callable[[str], bool] | None = None
    """For event probes: returns whether the event has a field with the given name."""

    @cached_property
    def btf(self) -> Btf | None:
        """The kernel's BTF, or None if the kernel has none."""
        return self.types()

    @cached_property
    def prototype(self) -> ProbedFunction | None:
        """The prototype of the probed function, or None if BTF does not have it."""
        from emulated_kernel.trace.fetch.btf_args import find_function

        return find_function(self.btf, self.function, self.first_parameter)

    @property
    def has_parameters(self) -> bool:
        """Whether arguments can be parameters of the probed function, at its entry or return."""
        return self.on_entry or (self.on_return and InterfaceRule.ENTRY_ARGS in self.interface)

    @property
    def on_event(self) -> bool:
        """Whether the arguments are for an event probe. If so, `$NAME` is a field, and `%REG` an error."""
        return self.finish is not None


def parse_args(words: Sequence[str], context: FetchContext) -> tuple[ProbeArg, ...]:
    """Compile the arguments of a command. `words` are the words from the third word on.

    In Linux up to 6.1, arguments after the 128th are silently ignored.
    Raises: KernelError EINVAL, ERANGE, E2BIG (logged). Mirrors: traceprobe_parse_probe_arg (v6.1).
    """
    interface = context.interface
    if context.on_event or not interface.rules.isdisjoint(_RULES_BY_FUNCTION):
        return _parse_args(words, context)
    kind = (context.on_return, context.on_entry, context.in_kernel, context.in_fprobe)
    with suppress(KernelError):
        return _parsed(tuple(words), context.arch, interface, *kind)
    return _parse_args(words, context)


@lru_cache(maxsize=256)
def _parsed(
    words: tuple[str, ...],
    arch: Arch,
    interface: Interface,
    on_return: bool,
    on_entry: bool,
    in_kernel: bool,
    in_fprobe: bool,
) -> tuple[ProbeArg, ...]:
    """Compile arguments without logging errors. Many events have equal arguments, so results are cached."""
    log = TraceProbeLog(ErrorLog(lambda: 0), "", words)
    context = FetchContext(arch, log, interface, on_return, on_entry, in_kernel, in_fprobe=in_fprobe)
    return _parse_args(words, context)


def _parse_args(words: Sequence[str], context: FetchContext) -> tuple[ProbeArg, ...]:
    args: list[ProbeArg] = []
    size = 0
    words = expand_args(words, context, MAX_TRACE_ARGS)
    for number, word in enumerate(words[:MAX_TRACE_ARGS]):
        context.log.index = number + 2
        name, body, offset = _split_name(word, number, args, context)
        arg = _ArgParser(context, body, offset).parse(name, size)
        args.append(arg if context.finish is None else context.finish(arg))
        size += args[-1].size
    return tuple(args)


def _split_name(
    word: str, number: int, args: Sequence[ProbeArg], context: FetchContext
) -> tuple[str, str, int]:
    """Split `[NAME=]EXPR` into the name, the expression, and the column at which the expression starts.

    `number`: index of the argument, from which its default name is made. `args`: the arguments before this
    argument; its name must differ from theirs.
    Raises: KernelError EINVAL (logged).
    """
    log = context.log
    name, equals, body = word.partition("=")
    if not equals:
        name = word.partition(":")[0]
        if InterfaceRule.BTF_ARGS not in context.interface or not is_good_name(name):
            name = f"arg{number + 1}"
        body = word
    elif len(name) > MAX_ARG_NAME_LEN:
        raise log.error(0, ProbeError.ARG_NAME_TOO_LONG)
    elif not name:
        raise log.error(0, ProbeError.NO_ARG_NAME)
    if not is_good_name(name):
        raise log.error(0, ProbeError.BAD_ARG_NAME)
    if name in RESERVED_NAMES or any(arg.name == name for arg in args):
        raise log.error(0, ProbeError.USED_ARG_NAME)
    return name, body, len(word) - len(body)


def first_difference(args: Sequence[ProbeArg], others: Sequence[ProbeArg]) -> int | None:
    """Return the index of the first argument that differs in name or type, or None if none differs.

    If the numbers of arguments differ, return the index of the first extra argument.
    Mirrors: kernel/trace/trace_probe.c:trace_probe_compare_arg_type (v6.1).
    """
    if len(args) != len(others):
        return min(len(args), len(others))
    for index, (one, other) in enumerate(zip(args, others, strict=True)):
        if (one.name, one.type, one.count) != (other.name, other.type, other.count):
            return index
    return None


def argument_insn(arch: Arch, number: int) -> FetchInsn:
    """Return the operation that loads function argument `number`, counted from 0, at a function's entry.

    Mirrors: regs_get_kernel_argument (v6.1).
    """
    registers = arch.registers
    beyond = number - len(registers.arguments)
    if beyond < 0:
        return FetchInsn(FetchOp.REG, name=registers.arguments[number])
    return FetchInsn(FetchOp.ARG) if registers.link else FetchInsn(FetchOp.STACK, value=beyond + 1)


class _ArgParser:
    """Parser of one argument's expression and type, which are `body`.

    `offset` is the column of `body` in the command's word, for carets in error_log. In the methods, `at` is
    the column of the parsed text in `body`.
    """

    def __init__(self, context: FetchContext, body: str, offset: int) -> None:
        self._context = context
        self._arch = context.arch
        self._body = body
        self._offset = offset
        self._bits = 8 * context.arch.word_size
        self._rules = context.interface.rules
        self._named: NamedArgs | None = None
        """The compiler of the name that determined the BTF type of the value, or None."""
        self._depth = 0
        """Number of dereferences, typecasts and per-CPU accesses around the current expression."""
        self._end = 0
        """Column for errors that are found after the parsing.

        It is the column of the last field, or of the operand of the outermost dereference. The value is 0
        if the argument has neither, or if the interface lacks InterfaceRule.LATE_CHECKS.
        """

    def parse(self, name: str, size: int) -> ProbeArg:
        """Compile the argument. `size` is the size of the arguments before it, in bytes.

        Raises: KernelError EINVAL, ERANGE, E2BIG (logged).
        """
        is_long = InterfaceRule.LONG_ARGUMENTS in self._rules
        if len(self._body) > (_LONG_ARGSTR_LEN if is_long else MAX_ARGSTR_LEN):
            too_long = errno.E2BIG if InterfaceRule.LATE_CHECKS in self._rules else errno.EINVAL
            raise self._error(0, ProbeError.ARG_TOO_LONG, too_long)
        if not self._body:
            raise self._error(0, ProbeError.NO_ARG_BODY)
        expression, type_name, count = self._split_type()
        fetch_type = self._find_type(expression, type_name, count)
        is_late = InterfaceRule.LATE_CHECKS in self._rules
        if not is_late:
            self._check_size(size, fetch_type, count)
        code = self._expression(expression, 0)
        if self._named is not None:
            fetch_type = self._typed(self._named, fetch_type, type_name, code)
        if is_late:
            self._check_size(size, fetch_type, count)
        else:
            self._end = 0
        type_column = self._end + self._type_column(expression, type_name)
        if wrong := fetch_type.source_error(code[-1].op):
            raise self._error(type_column, wrong)
        program = fetch_type.with_store(tuple(code), is_array=bool(count))
        grows = is_late and program[-1].op is FetchOp.ST_RAW
        self._need_room(len(program), self._end, code=errno.E2BIG if grows else errno.EINVAL)
        stages = self._stages(program, type_name, fetch_type, count, type_column)
        return ProbeArg(name, self._body, fetch_type, count, size, stages)

    def _check_size(self, size: int, fetch_type: FetchType, count: int) -> None:
        if size + fetch_type.size * (count or 1) > MAX_PROBE_EVENT_SIZE:
            raise self._error(self._end, ProbeError.EVENT_TOO_BIG, errno.E2BIG)

    def _error(self, column: int, error: ProbeError, code: int = errno.EINVAL) -> KernelError:
        """Log an error, and return the exception to raise.

        `column`: column of the error in the argument's expression and type. `code`: errno of the exception.
        """
        return self._context.log.error(self._offset + column, error, code)

    @staticmethod
    def _type_column(expression: str, type_name: str | None) -> int:
        return 0 if type_name is None else len(expression) + 1

    # Type

    def _split_type(self) -> tuple[str, str | None, int]:
        """Split the argument into expression and type.

        Return the expression, the type's name (None if the argument has no type), and the array's length (0
        if the type is not an array).
        """
        expression, colon, type_name = self._body.partition(":")
        if not colon:
            return expression, None, 0
        type_name, bracket, array = type_name.partition("[")
        if not bracket:
            return expression, type_name, 0
        return expression, type_name, self._array_count(array, len(self._body) - len(array))

    def _array_count(self, array: str, column: int) -> int:
        digits, bracket, rest = array.partition("]")
        if not bracket:
            raise self._error(len(self._body), ProbeError.ARRAY_NO_CLOSE)
        if rest:
            raise self._error(column + len(digits) + 1, ProbeError.BAD_ARRAY_SUFFIX)
        try:
            count = kstrtoul(digits, bits=32)
        except KernelError:
            count = 0
        if not count:
            raise self._error(column, ProbeError.BAD_ARRAY_NUM)
        if count > MAX_ARRAY_LEN:
            raise self._error(column, ProbeError.ARRAY_TOO_BIG)
        return count

    def _find_type(self, expression: str, type_name: str | None, count: int) -> FetchType:
        literal = expression in ("$comm", "$COMM") or expression.startswith('\\"')
        if literal and not self._context.on_event:
            if count or type_name not in (None, "string"):
                if InterfaceRule.STRING_TYPE_LOGGED in self._rules:
                    column = self._type_column(expression, type_name)
                    raise self._error(column, ProbeError.NEED_STRING_TYPE)
                raise KernelError(errno.EINVAL, "the command's name and literal strings are strings")
            type_name = "string"
        interface = self._context.interface
        fetch_type = find_fetch_type(type_name, self._arch.word_size, interface)
        if not self._context.in_kernel and InterfaceRule.UPROBE_SYMBOLS_REFUSED in interface:
            fetch_type = None if type_name in ("symbol", "symstr") else fetch_type
        if fetch_type is None:
            raise self._error(self._type_column(expression, type_name), ProbeError.BAD_TYPE)
        return fetch_type

    # Expressions. Mirrors: kernel/trace/trace_probe.c:parse_probe_arg (v6.1). `at` is the caret's column.

    def _expression(self, text: str, at: int) -> list[FetchInsn]:
        if InterfaceRule.TYPECASTS in self._rules:
            return self._nested(text, at)
        return self._innermost(text, at)

    def _nested(self, text: str, at: int) -> list[FetchInsn]:
        """Compile `text`, an expression at column `at`, if the interface has InterfaceRule.TYPECASTS.

        Mirrors: kernel/trace/trace_probe.c:parse_probe_arg_nested (v7.3).
        """
        per_cpu = next((begin for begin in _PER_CPU if text.startswith(begin)), None)
        if per_cpu is None and text[:1] not in ("+", "-", "("):
            if self._context.on_event and is_good_name(text[:1]):
                return [self._field_by_name(text, at)]
            return self._innermost(text, at)
        if self._depth >= _MAX_NESTED:
            raise self._error(at, ProbeError.TOO_MANY_NESTED, errno.E2BIG)
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
            raise self._error(at, ProbeError.NO_EVENT_FIELD)
        return FetchInsn(FetchOp.TP_ARG, name=name)

    def _of_cpu(self, text: str, at: int, begin: str) -> list[FetchInsn]:
        """Compile `this_cpu_ptr(EXPR)` or `this_cpu_read(EXPR)`, which starts with `begin`."""
        if self._context.on_event or not self._context.in_kernel:
            raise self._error(at, ProbeError.NOSUP_PERCPU)
        at += len(begin)
        inner, closed, _ = text[len(begin) :].rpartition(")")
        if not closed:
            raise self._error(at + len(text) - len(begin), ProbeError.DEREF_OPEN_BRACE)
        code = self._expression(inner, at)
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
            raise self._error(at, ProbeError.NOSUP_BTFARG, errno.EOPNOTSUPP)
        cast, closed, rest = text.partition(")")
        if not closed:
            raise self._error(at + len(text), ProbeError.DEREF_OPEN_BRACE)
        start = at + len(cast) + 1
        end, skipped = self._operand(rest, start)
        fields = end + skipped + 2
        code = self._expression(rest[skipped:end], start + skipped)
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
                raise self._error(at, ProbeError.DEREF_OPEN_BRACE)
        elif text[:1] in ("+", "-") or text.startswith(tuple(_PER_CPU)):
            begin = text.find("(", 1)
            if begin < 0:
                raise self._error(at, ProbeError.DEREF_NEED_BRACE)
            end, skipped = _closing(text, begin) + 1, 0
            if not end:
                raise self._error(at + len(text), ProbeError.DEREF_OPEN_BRACE)
        else:
            sign = min((at for at in (text.find("+"), text.find("-")) if at >= 0), default=-1)
            if text.startswith("@") and sign >= 0 and is_digit(text, sign + 1):
                raise self._error(at, ProbeError.TYPECAST_SYM_OFFSET)
            end, skipped = text.find("-"), 0
            if end < 0 or text[end + 1 : end + 2] != ">":
                raise self._error(at + len(text), ProbeError.TYPECAST_REQ_FIELD)
        if text[end + skipped : end + skipped + 2] != "->":
            raise self._error(at + end + skipped, ProbeError.TYPECAST_REQ_FIELD)
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
        raise self._error(at, ProbeError.BAD_FETCH_ARG)

    def _names(self) -> NamedArgs:
        """Return a new compiler of names. Store it, because it has the BTF type of the compiled value."""
        from emulated_kernel.trace.fetch.named_args import NamedArgs

        context = self._context
        first = context.first_parameter
        self._named = NamedArgs(
            context.prototype, lambda index: self._parameter(index + first), self._error, FETCH_INSN_MAX - 1
        )
        return self._named

    def _by_name(self, text: str, at: int) -> list[FetchInsn]:
        context = self._context
        if not context.has_parameters:
            raise self._error(at, ProbeError.NOSUP_BTFARG)
        if context.btf is None:
            raise self._error(at, ProbeError.NOSUP_BTFARG, errno.EOPNOTSUPP)
        return self._names().named(text, at)

    def _cast(self, text: str, at: int) -> list[FetchInsn]:
        """Compile `(STRUCTURE)NAME->FIELD`, in which NAME is a field of an event probe's event."""
        context = self._context
        if context.has_field is None:
            raise self._error(at, ProbeError.TYPECAST_NOT_EVENT)
        structure, closed, inner = text[1:].partition(")")
        if not closed:
            raise self._error(at + len(text), ProbeError.DEREF_OPEN_BRACE)
        at += len(structure) + 2
        return self._names().cast(context.btf, structure, inner, at, context.has_field)

    def _return_value(self, text: str, at: int) -> list[FetchInsn]:
        """Compile `$retval`, with its type and fields if the interface has them. `text` begins with `$`."""
        if not self._context.on_return:
            raise self._error(at, ProbeError.RETVAL_ON_PROBE)
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

    def _typed(
        self, named: NamedArgs, default: FetchType, type_name: str | None, code: list[FetchInsn]
    ) -> FetchType:
        """Return the fetch type of a value that `named` has compiled.

        `type_name`: the type in the argument, or None if the argument has no type. `default`: the fetch
        type for `type_name`. If `type_name` is None, the BTF type of the value decides. If `type_name` is a
        string type, append the dereference that it needs to `code`.
        """
        if named.end is not None:
            self._end = named.end
        if type_name is None and named.typed is not None:
            name = named.typed.fetch_type(self._bits)
            return find_fetch_type(name, self._arch.word_size, self._context.interface) or default
        if "string" in (type_name or ""):
            named.prepare_string(type_name or "", code, self._end)
        return default

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
        """Compile `$FIELD` of an event probe. In Linux up to 6.1, the field is looked up after the parsing.

        Mirrors: kernel/trace/trace_probe.c:parse_probe_vars (v6.12).
        """
        has_field = self._context.has_field
        if InterfaceRule.LATE_CHECKS in self._rules and has_field is not None and not has_field(name):
            if name not in COMM_NAMES:
                raise self._error(at, ProbeError.BAD_VAR)
            return FetchInsn(FetchOp.COMM)
        return FetchInsn(FetchOp.TP_ARG, name=name)

    def _special(self, name: str, at: int) -> FetchInsn:
        """Compile `$stack`, `$stackN`, `$comm` or `$argN`."""
        context = self._context
        if name == "stack":
            return FetchInsn(FetchOp.STACKP, name=self._arch.registers.sp)
        if name.startswith("stack") and is_digit(name, 5):
            number = self._number_of(name[5:], at)
            if context.in_kernel and number > PARAM_MAX_STACK:
                raise self._error(at, ProbeError.BAD_STACK_NUM)
            return FetchInsn(FetchOp.STACK, value=number)
        if name in COMM_NAMES:
            return FetchInsn(FetchOp.COMM)
        is_late = InterfaceRule.LATE_CHECKS in self._rules
        if name.startswith("arg") and (context.has_parameters or is_late):
            number = self._number_of(name[3:], at)
            if not 0 < number <= PARAM_MAX_STACK:
                raise self._error(at, ProbeError.BAD_ARG_NUM)
            if not context.has_parameters:
                raise self._error(at, ProbeError.NOFENTRY_ARGS)
            return self._parameter(number - 1 + context.first_parameter)
        raise self._error(at, ProbeError.BAD_VAR)

    def _number_of(self, digits: str, at: int) -> int:
        try:
            return kstrtoul(digits, 10, self._bits)
        except KernelError:
            raise self._error(at, ProbeError.BAD_VAR) from None

    def _register(self, name: str, at: int) -> FetchInsn:
        no_registers = self._context.on_event or self._context.in_fprobe
        if no_registers:
            refused = self._error(at, ProbeError.BAD_VAR)
            if InterfaceRule.TYPECASTS in self._rules:
                raise refused
            # Linux continues after the first error, finds that nothing was fetched, and logs a second error.
            raise self._error(at, ProbeError.BAD_FETCH_ARG)
        attribute = self._arch.registers.names.get(name)
        if attribute is None:
            raise self._error(at, ProbeError.BAD_REG_NAME)
        return FetchInsn(FetchOp.REG, name=attribute)

    def _memory(self, place: str, at: int) -> list[FetchInsn]:
        dereference = FetchInsn(FetchOp.DEREF)
        if is_digit(place):
            address = self._logged(kstrtoul, place, at, ProbeError.BAD_MEM_ADDR)
            return [FetchInsn(FetchOp.IMM, value=address), dereference]
        if place.startswith("+"):
            return [self._file_offset(place[1:], at), dereference]
        if not self._context.in_kernel:
            raise self._error(at, ProbeError.SYM_ON_UPROBE)
        return [FetchInsn(FetchOp.SYMBOL, name=place), FetchInsn(FetchOp.IMM), dereference]

    def _file_offset(self, number: str, at: int) -> FetchInsn:
        if self._context.in_kernel:
            raise self._error(at, ProbeError.FILE_ON_KPROBE)
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
            raise self._error(at, ProbeError.DEREF_NEED_BRACE)
        offset = self._logged(kstrtol, number, at, ProbeError.BAD_DEREF_OFFS)
        at += len(number) + (1 if text[0] == "-" else 2)
        if ")" not in inner:
            raise self._error(at + len(inner), ProbeError.DEREF_OPEN_BRACE)
        code = self._expression(inner.rpartition(")")[0], at)
        self._check_pointer(code, at)
        return self._extended(code, FetchInsn(op, value=_as_int(offset)), at)

    def _check_pointer(self, code: list[FetchInsn], at: int) -> None:
        """Check that the value of `code` can be a pointer. `at`: column of the value's expression.

        Raises: KernelError EINVAL (the value is a string; logged).
        """
        if code[-1].op in (FetchOp.COMM, FetchOp.DATA):
            raise self._error(at, ProbeError.COMM_CANT_DEREF)

    def _extended(self, code: list[FetchInsn], insn: FetchInsn, at: int) -> list[FetchInsn]:
        """Return `code` followed by the operation `insn`, after which the value has no BTF type.

        `at`: column for errors.
        Raises: KernelError EINVAL (too many operations; logged).
        """
        self._end = at
        self._named = None
        if len(code) == FETCH_INSN_MAX - 1:
            raise self._error(at, ProbeError.TOO_MANY_OPS)
        return [*code, insn]

    def _immediate(self, text: str, at: int) -> FetchInsn:
        if text.startswith('"'):
            body = text[1:]
            if not body.endswith('"'):
                raise self._error(at + 2 + len(body), ProbeError.IMMSTR_NO_CLOSE)
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
            raise self._error(at, error, failure.errno) from None

    # After the store operation. Mirrors: kernel/trace/trace_probe.c:traceprobe_parse_probe_arg_body (v6.1).

    def _stages(
        self, program: FetchProgram, type_name: str | None, fetch_type: FetchType, count: int, column: int
    ) -> FetchStages:
        """Divide the program into stages, and add a bitfield's shift and an array's count.

        `column` is the column of the type, for carets in error_log.
        """
        load, *others, store = program
        derefs = [insn for insn in others if insn.op is not FetchOp.IMM]
        length = len(program)
        try:
            bitfield = bitfield_of(type_name, fetch_type, self._bits)
        except ValueError:
            raise self._error(column, ProbeError.BAD_BITFIELD) from None
        if bitfield is not None:
            length += 1
            self._need_room(length, column, ProbeError.BAD_BITFIELD)
        elif type_name is None and self._named is not None and (field := self._named.bit_field()):
            bitfield = field
            length += 1
            self._need_room(length, self._end)
        if count:
            if store.op not in _ARRAY_STORES:
                raise self._error(column, ProbeError.BAD_STRING)
            is_late = InterfaceRule.LATE_CHECKS in self._rules
            self._need_room(length + 1, self._end, code=errno.E2BIG if is_late else errno.EINVAL)
        pointer = derefs.pop() if count and derefs and fetch_type.is_dynamic else None
        return FetchStages(load, tuple(derefs), pointer, store, bitfield, count)

    def _need_room(
        self,
        length: int,
        column: int,
        error: ProbeError = ProbeError.TOO_MANY_OPS,
        code: int = errno.EINVAL,
    ) -> None:
        if length >= FETCH_INSN_MAX:
            raise self._error(column, error, code)


def _closing(text: str, begin: int) -> int:
    """Return the position of the parenthesis that closes the one at `begin`, or -1.

    Mirrors: kernel/trace/trace_probe.c:find_matched_close_paren (v7.3).
    """
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at
    return -1


def _str_to_immediate(text: str, base: int, bits: int) -> int:
    """Parse the number of an immediate value, which follows a backslash.

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
