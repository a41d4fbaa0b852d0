"""Parser of fetch arguments, which compiles [NAME=]EXPRESSION[:TYPE] to a fetch program."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from contextlib import suppress
from functools import lru_cache

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.trace.fetch.expand_args import expand_args
from emulated_kernel.trace.fetch.fetch_context import FetchContext
from emulated_kernel.trace.fetch.fetch_expression import FETCH_INSN_MAX, ExpressionParser
from emulated_kernel.trace.fetch.fetch_insn import FetchInsn, FetchOp, FetchProgram, FetchStages
from emulated_kernel.trace.fetch.fetch_types import FetchType, bitfield_of, find_fetch_type
from emulated_kernel.trace.fetch.probe_arg import ProbeArg
from emulated_kernel.trace.interface import Interface, InterfaceRule
from emulated_kernel.trace.text.chars import is_good_name
from emulated_kernel.trace.text.error_log import ErrorLog
from emulated_kernel.trace.text.numbers import kstrtoul
from emulated_kernel.trace.text.probe_errors import ProbeError, TraceProbeLog
from emulated_kernel.util.errors import KernelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.trace.fetch.named_args import NamedArgs

MAX_TRACE_ARGS = 128
"""Maximum number of arguments of an event."""
MAX_ARG_NAME_LEN = 32
"""Maximum length of an argument's name in bytes."""
MAX_ARGSTR_LEN = 63
"""Maximum length of an argument's expression and type in bytes."""
_LONG_ARGSTR_LEN = 255
"""Value of MAX_ARGSTR_LEN since Linux 7.3."""
MAX_ARRAY_LEN = 64
"""Maximum number of elements of an array."""
MAX_PROBE_EVENT_SIZE = 3072
"""Maximum size of all arguments in the fixed part of an entry, in bytes."""
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
"""Interface rules under which the same text can mean different arguments for different functions."""
_ARRAY_STORES = frozenset({FetchOp.ST_MEM, FetchOp.ST_STRING, FetchOp.ST_USTRING})


def parse_args(words: Sequence[str], context: FetchContext) -> tuple[ProbeArg, ...]:
    """Compile the arguments of a command. `words` are the command's words from the third word on.

    In Linux up to 6.1, arguments after the 128th are silently ignored.
    Raises: KernelError EINVAL (malformed, or not allowed for this probe), ERANGE (a number is too large),
    E2BIG (too long or too many), ENOENT (a name is unknown), EOPNOTSUPP (no BTF), ENOMEM (see
    expand_dentry_args()). Most are logged.
    Mirrors: kernel/trace/trace_probe.c:traceprobe_parse_probe_arg (v6.1).
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
    """Compile arguments without logging errors. Many events have equal arguments, so results are cached.

    The parameters after `words` are those of FetchContext. Raises: the errors of parse_args(), which then
    parses again to log them.
    """
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
    """Split `[NAME=]EXPR[:TYPE]`. Return the name, the text after `=`, and the column where this text starts.

    `number`: index of the argument, from 0; the default name is EXPR if this is a plain name and the
    interface has InterfaceRule.BTF_ARGS, otherwise `arg1` for index 0. `args`: the arguments before this
    argument; its name must differ from theirs.
    Raises: KernelError EINVAL (the name is empty, too long, malformed, reserved or in use; logged).
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


class _ArgParser:
    """Parser of one argument's expression and type, which are `body`.

    `offset` is the column of `body` in the command's word, for carets in error_log.
    """

    def __init__(self, context: FetchContext, body: str, offset: int) -> None:
        self._context = context
        self._body = body
        self._bits = 8 * context.arch.word_size
        self._rules = context.interface.rules
        self._expression = ExpressionParser(context, offset)
        self._error = self._expression.error
        self._end = 0
        """Column for errors that are found after the parsing, from ExpressionParser.end.

        The value stays 0 if the interface lacks InterfaceRule.LATE_CHECKS.
        """

    def parse(self, name: str, size: int) -> ProbeArg:
        """Compile the argument called `name`.

        `size`: bytes of all arguments before it in the fixed part of an entry.

        Raises: KernelError EINVAL (malformed, or not allowed for this probe), E2BIG (the argument, the event
        or the program is too long), errors of ExpressionParser.compile(); almost all are logged.
        Mirrors: kernel/trace/trace_probe.c:traceprobe_parse_probe_arg_body (v6.1).
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
        code = self._expression.compile(expression, 0)
        self._end = self._expression.end
        if (named := self._expression.named) is not None:
            fetch_type = self._typed(named, fetch_type, type_name, code)
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

    @staticmethod
    def _type_column(expression: str, type_name: str | None) -> int:
        return 0 if type_name is None else len(expression) + 1

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
        fetch_type = find_fetch_type(type_name, self._context.arch.word_size, interface)
        if not self._context.in_kernel and InterfaceRule.UPROBE_SYMBOLS_REFUSED in interface:
            fetch_type = None if type_name in ("symbol", "symstr") else fetch_type
        if fetch_type is None:
            raise self._error(self._type_column(expression, type_name), ProbeError.BAD_TYPE)
        return fetch_type

    def _typed(
        self, named: NamedArgs, default: FetchType, type_name: str | None, code: list[FetchInsn]
    ) -> FetchType:
        """Return the fetch type of a value that `named` has compiled.

        `type_name`: the type in the argument, or None if the argument has no type. `default`: the fetch type
        for `type_name`. If `type_name` is None, return the fetch type that fits the BTF type of the value. If
        `type_name` is a string type, append to `code` the dereference that this type needs.
        """
        if named.end is not None:
            self._end = named.end
        if type_name is None and named.typed is not None:
            name = named.typed.fetch_type(self._bits)
            return find_fetch_type(name, self._context.arch.word_size, self._context.interface) or default
        if "string" in (type_name or ""):
            named.prepare_string(type_name or "", code, self._end)
        return default

    def _stages(
        self, program: FetchProgram, type_name: str | None, fetch_type: FetchType, count: int, column: int
    ) -> FetchStages:
        """Divide the program into stages, and add a bitfield's shift and an array's count.

        `type_name`: the type in the argument, or None. `count`: number of array elements, or 0. `column`:
        column of the type, for carets in error_log.
        """
        named = self._expression.named
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
        elif type_name is None and named is not None and (field := named.bit_field()):
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
