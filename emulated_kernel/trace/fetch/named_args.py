"""NamedArgs: compiles `NAME->FIELD.FIELD` and `$retval`, whose types are looked up in the kernel's BTF.

fetch_expression.py imports this file at the first argument of this kind, because most kernels never get such
an argument.
"""

from __future__ import annotations

import errno
from collections.abc import Callable

from emulated_kernel.trace.fetch.btf_args import (
    FieldError,
    ProbedFunction,
    TypedValue,
    find_structure,
    follow_fields,
    split_field,
)
from emulated_kernel.trace.fetch.fetch_insn import FetchInsn, FetchOp
from emulated_kernel.trace.text.probe_errors import ProbeError
from emulated_kernel.util.errors import KernelError

TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.image.linux.btf import Btf

LogError = Callable[[int, ProbeError, int], KernelError]
"""Function (column, error, errno) that logs an error, and returns the exception to raise."""


class NamedArgs:
    """Compiles the names of parameters and fields in one fetch argument to fetch operations."""

    def __init__(
        self,
        function: ProbedFunction | None,
        parameter: Callable[[int], FetchInsn],
        error: LogError,
        limit: int,
    ) -> None:
        """Create a compiler for one argument. `function`: the probed function, or None if the BTF lacks it.

        `parameter` maps the index of a parameter to the operation that loads it. `limit` is the maximum
        number of operations.
        """
        self._function = function
        self._parameter = parameter
        self._error = error
        self._limit = limit
        self.typed: TypedValue | None = None
        """Type of the argument's value, or None while no name has been compiled."""
        self.end: int | None = None
        """Column of the last field, or None if the argument has no fields."""

    def named(self, text: str, at: int) -> list[FetchInsn]:
        """Return the operations for `text`, which is `NAME->FIELD.FIELD` at column `at`.

        NAME is a parameter of the function.

        Raises: KernelError ENOENT (a name is not in the BTF), EINVAL (the text does not fit the types, or too
        many operations), EOPNOTSUPP (`.` follows NAME); all are logged.
        Mirrors: kernel/trace/trace_probe.c:parse_btf_arg (v6.12).
        """
        name, fields, column = self._root(text, at)
        function = self._function
        if function is None or not function.parameters:
            raise self._error(at, ProbeError.NO_BTF_ENTRY, errno.ENOENT)
        index = function.index(name)
        if index is None:
            raise self._error(at, ProbeError.NO_BTFARG, errno.ENOENT)
        typed = function.typed(function.parameters[index][1])
        return self._fields([self._parameter(index)], typed, fields, column)

    def return_value(self, load: FetchInsn, text: str, at: int) -> list[FetchInsn]:
        """Return the operations for `$retval->FIELD.FIELD`.

        `load` loads the value of $retval. `text` is the whole expression, at column `at`.
        Raises: KernelError as named(); ENOENT also if the function returns nothing.
        """
        name, fields, column = self._root(text, at)
        if name != "$retval":
            return self.named(text, at)
        function = self._function
        if function is None:
            if fields is not None:
                raise self._error(column, ProbeError.NO_BTF_ENTRY, errno.ENOENT)
            return [load]
        if not function.returns:
            raise self._error(at, ProbeError.NO_RETVAL, errno.ENOENT)
        return self._fields([load], function.typed(function.returns), fields, column)

    def cast(
        self, btf: Btf | None, structure: str, text: str, at: int, has_field: Callable[[str], bool]
    ) -> list[FetchInsn]:
        """Return the operations for `(STRUCTURE)text`, in which `text` at column `at` is `NAME->FIELD.FIELD`.

        NAME is a field of the event of an event probe. `has_field` returns whether the event has a field of
        the given name.
        Raises: KernelError as named(); EINVAL also if the structure or NAME is unknown.
        Mirrors: kernel/trace/trace_probe.c:handle_typecast (v7.2).
        """
        typed = find_structure(btf, structure)
        if typed is None:
            raise self._error(at - len(structure) - 1, ProbeError.NO_PTR_STRCT, errno.EINVAL)
        name, fields, column = self._root(text, at)
        if not has_field(name):
            raise self._error(at, ProbeError.BAD_ATTACH_ARG, errno.EINVAL)
        return self._fields([FetchInsn(FetchOp.TP_ARG, name=name)], typed, fields, column, is_cast=True)

    def cast_value(
        self, btf: Btf | None, cast: tuple[str, int], code: list[FetchInsn], fields: tuple[str, int]
    ) -> list[FetchInsn]:
        """Return the operations for `(STRUCTURE,MEMBER)VALUE->FIELDS`.

        `cast`: the text in parentheses and its column. `code` loads VALUE, which points to the structure, or
        to its member MEMBER. `fields`: the text FIELDS and its column.
        Raises: KernelError EINVAL (the structure is unknown, the text does not fit it, or too many
        operations), ENOENT (no such field); all are logged.
        Mirrors: kernel/trace/trace_probe.c:parse_btf_casttype (v7.3).
        """
        text, at = cast
        name, comma, member = text.partition(",")
        typed = find_structure(btf, name)
        if typed is None:
            raise self._error(at, ProbeError.NO_PTR_STRCT, errno.EINVAL)
        before = self._member_offset(typed, member, at + len(name) + 1) if comma else 0
        return self._fields(code, typed, *fields, is_cast=True, before=before)

    def _member_offset(self, typed: TypedValue, member: str, at: int) -> int:
        """Return the offset in bytes of a member from the start of the structure `typed`.

        `member`: the text `FIELD.FIELD` that names the member, at column `at`.
        """
        try:
            offset, value, last = next(follow_fields(typed, member, is_cast=True))
        except FieldError as failure:
            raise self._error(at + failure.column, failure.error, failure.code) from None
        arrow = member.find("->")
        if value.bit_offset:
            column = last if arrow < 0 else arrow + 2
            raise self._error(at + column, ProbeError.TYPECAST_NOT_ALIGNED, errno.EINVAL)
        if arrow >= 0:
            raise self._error(at + arrow, ProbeError.TYPECAST_BAD_ARROW, errno.EINVAL)
        return offset

    def current(self, btf: Btf | None, text: str, at: int) -> list[FetchInsn]:
        """Return the operations for `text`, an expression `$current->FIELDS`.

        `at`: column of `text` in the argument's expression.
        Raises: KernelError as named().
        """
        _, fields, column = self._root(text, at)
        typed = find_structure(btf, "task_struct")
        if typed is None:
            raise self._error(at, ProbeError.NO_BTF_ENTRY, errno.ENOENT)
        return self._fields([FetchInsn(FetchOp.CURRENT)], typed, fields, column, is_cast=True)

    def _root(self, text: str, at: int) -> tuple[str, str | None, int]:
        """Split `NAME->FIELDS`. Return the name, the fields, and the column of the fields.

        If `text` is only a name, the fields are None.
        """
        try:
            name, fields, is_arrow = split_field(text)
        except FieldError as failure:
            raise self._error(at + failure.column, failure.error, failure.code) from None
        column = at + len(text) - len(fields or "")
        if fields is not None and not is_arrow:
            raise self._error(column, ProbeError.NOSUP_DAT_ARG, errno.EOPNOTSUPP)
        return name, fields, column

    def _fields(
        self,
        root: list[FetchInsn],
        typed: TypedValue,
        fields: str | None,
        column: int,
        *,
        is_cast: bool = False,
        before: int = 0,
    ) -> list[FetchInsn]:
        """Return `root`, which loads a value, followed by the operations that read `fields` of this value.

        Set the attribute `typed` to the type of the final value. If there are fields, set the attribute `end`
        to the last field's column.

        The parameter `typed`: type of the value. If `is_cast` is set, `typed` is the type of the structure to
        which the value points, and the value points to byte `before` of the structure. `fields`: a text like
        `FIELD.FIELD->FIELD` at `column`, or None if no field is named.
        Raises: KernelError EINVAL (`fields` does not fit the type, or too many operations), ENOENT (no such
        field); all are logged.
        """
        code = [*root]
        self.typed = typed
        if fields is None:
            return code
        try:
            for offset, value, last in follow_fields(typed, fields, is_cast=is_cast):
                self.typed = value
                if len(code) == self._limit:
                    raise self._error(column + last, ProbeError.TOO_MANY_OPS, errno.EINVAL)
                code.append(FetchInsn(FetchOp.DEREF, value=offset - before))
                self.end = column + last
                before = 0
        except FieldError as failure:
            raise self._error(column + failure.column, failure.error, failure.code) from None
        return code

    def prepare_string(self, type_name: str, code: list[FetchInsn], column: int) -> None:
        """Append to `code` the dereference of a character pointer, which the type `type_name` needs.

        `type_name`: `string` or `ustring`. Append nothing if the value is a character array, or if its type
        is unknown. `column`: column for errors.
        Raises: KernelError EINVAL (the value is not a string), E2BIG (too many operations); both are logged.
        Mirrors: kernel/trace/trace_probe.c:check_prepare_btf_string_fetch (v6.12).
        """
        typed = self.typed
        if typed is None or typed.is_char_array:
            return
        if not typed.is_char_pointer:
            raise self._error(column, ProbeError.BAD_TYPE4STR, errno.EINVAL)
        if len(code) == self._limit:
            raise self._error(column, ProbeError.TOO_MANY_OPS, errno.E2BIG)
        code.append(FetchInsn(FetchOp.UDEREF if type_name.startswith("u") else FetchOp.DEREF))

    def bit_field(self) -> FetchInsn | None:
        """Return the operation whose shifts extract the bit field; None if the value is not a bit field.

        Mirrors: kernel/trace/trace_probe.c:parse_btf_bitfield (v6.12).
        """
        typed = self.typed
        if typed is None or not typed.has_bit_field:
            return None
        rshift = 64 - typed.bit_size
        return FetchInsn(FetchOp.MOD_BF, size=8, lshift=rshift - typed.bit_offset, rshift=rshift)
