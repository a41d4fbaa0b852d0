"""Compiler for print formats: the C expressions in a static event's `format` file, evaluated for a record.

Numbers are Python's ints, which have no width. A cast, a comparison or a conversion wraps a number to C's
width.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence

from emulated_kernel.trace.ring.trace_entry import COMMON_SIZE, EventField
from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.trace.text.chars import bytes_to_text
from emulated_kernel.trace.text.printf import Value, compile_format, signed, unsigned
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.fast_dataclass import dataclass
from emulated_kernel.util.fast_named_tuple import NamedTuple
from emulated_kernel.util.lazy_pattern import lazy_pattern


@dataclass(frozen=True)
class PrintContext:
    """The data for printing one record: the entry without its common fields, and the kernel's symbols."""

    payload: bytes
    symbols: KernelSymbols

    def number(self, offset: int, size: int, signed: bool) -> int:
        at = offset - COMMON_SIZE
        return int.from_bytes(self.payload[at : at + size], "little", signed=signed)

    def text(self, offset: int, size: int) -> str:
        """Return the string of at most `size` bytes at byte `offset` of the entry."""
        at = offset - COMMON_SIZE
        return bytes_to_text(self.payload[at : at + size].partition(b"\0")[0])


Expression = Callable[[PrintContext], Value]


@dataclass(frozen=True)
class KernelNames:
    """The kernel's names that a print format may use."""

    variables: Mapping[str, Callable[[], int]]
    constants: Mapping[str, int]
    """Name of an enumerator -> its value."""
    sizes: Mapping[str, int]
    """Name of a struct -> its size in bytes, for pointer arithmetic."""
    functions: Mapping[str, Callable[[int], int]]
    """Name of a kernel function with one argument -> Python function that computes its result."""


@dataclass(frozen=True)
class _Pointer:
    """An expression whose value is a pointer to an object of `size` bytes."""

    value: Expression
    size: int

    def __call__(self, context: PrintContext) -> Value:
        return self.value(context)


_TOKEN = lazy_pattern(
    r'\s*(?:(?P<string>"(?:[^"\\]|\\.)*")|(?P<number>0[xX][0-9a-fA-F]+|\d+)[uUlL]*'
    r"|'(?P<char>[^'\\]|\\.)'"
    r"|(?P<name>[A-Za-z_]\w*)|(?P<op>->|<<|>>|<=|>=|==|!=|&&|\|\||[-+*/%&|^~!<>?:;=,(){}\[\]]))"
)
_BINARY: Mapping[str, tuple[int, Callable[[int, int], int]]] = {
    "||": (1, lambda a, b: int(bool(a) or bool(b))),
    "&&": (2, lambda a, b: int(bool(a) and bool(b))),
    "|": (3, lambda a, b: a | b),
    "^": (4, lambda a, b: a ^ b),
    "&": (5, lambda a, b: a & b),
    "==": (6, lambda a, b: int(not (a - b) & _MASK)),
    "!=": (6, lambda a, b: int(bool((a - b) & _MASK))),
    "<": (7, lambda a, b: int(a < b)),
    ">": (7, lambda a, b: int(a > b)),
    "<=": (7, lambda a, b: int(a <= b)),
    ">=": (7, lambda a, b: int(a >= b)),
    "<<": (8, lambda a, b: a << b),
    ">>": (8, lambda a, b: a >> b),
    "+": (9, lambda a, b: a + b),
    "-": (9, lambda a, b: a - b),
    "*": (10, lambda a, b: a * b),
    "/": (10, lambda a, b: a // b),
    "%": (10, lambda a, b: a % b),
}
_UNARY: Mapping[str, Callable[[int], int]] = {"-": lambda a: -a, "~": lambda a: ~a, "!": lambda a: int(not a)}
_MASK = (1 << 64) - 1
_BITS = {"char": 8, "u8": 8, "s8": 8, "short": 16, "u16": 16, "s16": 16, "u64": 64, "s64": 64, "loff_t": 64}
_TYPE_WORDS = (
    {"unsigned", "signed", "long", "int", "short", "char", "void", "struct", "const"}
    | {"bool", "gfp_t", "loff_t", "pid_t", "size_t"}
    | {f"{sign}{bits}" for sign in "us" for bits in (8, 16, 32, 64)}
)
_SAME = {f"{level}_val" for level in ("pgd", "p4d", "pud", "pmd", "pte")}
_SAME |= {f"native_make_{level}" for level in ("pgd", "p4d", "pud", "pmd", "pte")}
"""Functions of page table entries. Without a paravirtualizing hypervisor, they return their argument."""
_ESCAPES = {"n": "\n", "t": "\t", '"': '"', "\\": "\\"}


def compile_print_fmt(
    text: str, fields: Mapping[str, EventField], word_size: int, names: KernelNames
) -> Callable[[PrintContext], str]:
    """Compile the print format `text` into a function that prints records.

    `fields`: name -> field of the event. `word_size`: size of a long in bytes. `names`: the kernel's names
    that `text` may use.
    Raises: ValueError (syntax, unknown name).
    """
    parser = _FmtParser(text, fields, word_size, names)
    layout, arguments = parser.whole()
    render = compile_format(layout, word_size)
    return lambda context: render([argument(context) for argument in arguments], context.symbols)


class _Token(NamedTuple):
    kind: str
    text: str


def _tokens(text: str) -> Iterator[_Token]:
    at = 0
    while at < len(text.rstrip()):
        found = _TOKEN.match(text, at)
        if found is None or found.lastgroup is None:
            raise ValueError(f"print fmt: {text[at : at + 20]!r}")
        yield _Token(found.lastgroup, found[found.lastgroup])
        at = found.end()
    yield _Token("end", "")


class _FmtParser:
    """Recursive descent parser for the C expressions that print formats contain."""

    def __init__(
        self, text: str, fields: Mapping[str, EventField], word_size: int, names: KernelNames
    ) -> None:
        self._tokens = list(_tokens(text))
        self._at = 0
        self._fields = fields
        self._word = word_size
        self._names = names
        self._locals: dict[str, Expression] = {}
        """Name of a variable that a statement expression declares -> the compiled expression of its value."""

    def whole(self) -> tuple[str, list[Expression]]:
        """Parse the whole text, and return the format string and its arguments."""
        layout = self._string()
        arguments = []
        while self._accept(","):
            arguments.append(self.expression())
        if self._peek().kind != "end":
            raise ValueError(f"print fmt: {self._peek().text!r} is left over")
        return layout, arguments

    def _peek(self) -> _Token:
        return self._tokens[min(self._at, len(self._tokens) - 1)]

    def _next(self) -> _Token:
        token = self._peek()
        self._at += 1
        return token

    def _accept(self, text: str) -> bool:
        if self._peek().kind == "op" and self._peek().text == text:
            self._at += 1
            return True
        return False

    def _expect(self, text: str) -> None:
        if not self._accept(text):
            raise ValueError(f"print fmt: {text!r} is missing before {self._peek().text!r}")

    def _string(self) -> str:
        token = self._next()
        if token.kind != "string":
            raise ValueError("print fmt: no string")
        return re.sub(r"\\(.)", lambda found: _ESCAPES.get(found[1], found[1]), token.text[1:-1])

    def expression(self) -> Expression:
        """Parse and compile an expression that ends before a comma or a closing bracket."""
        condition = self._binary(0)
        if not self._accept("?"):
            return condition
        if_true = self.expression()
        self._expect(":")
        if_false = self.expression()
        return lambda context: if_true(context) if condition(context) else if_false(context)

    def _binary(self, above: int) -> Expression:
        left = self._unary()
        while True:
            token = self._peek()
            priority, operation = _BINARY.get(token.text, (0, None))
            if token.kind != "op" or operation is None or priority <= above:
                return left
            self._at += 1
            left = _apply(token.text, operation, left, self._binary(priority))

    def _unary(self) -> Expression:
        token = self._peek()
        if token.kind == "op" and token.text in _UNARY:
            self._at += 1
            operation = _UNARY[token.text]
            operand = self._unary()
            return lambda context: operation(int(operand(context)))
        if self._accept("&"):
            # The address of a field is represented by the field's bytes, like the address of an array.
            return self._unary()
        if self._accept("("):
            if self._accept("{"):
                return self._statements()
            if self._peek().text in _TYPE_WORDS:
                return self._cast()
            inner = self.expression()
            self._expect(")")
            return inner
        return self._primary()

    def _statements(self) -> Expression:
        """Parse and compile a statement expression of GCC from the text after its `({`.

        It has the form `({TYPE NAME = VALUE; ... RESULT;})`.
        """
        while self._peek().text in _TYPE_WORDS:
            while self._peek().text in _TYPE_WORDS:
                self._next()
            name = self._next().text
            self._expect("=")
            self._locals[name] = self.expression()
            self._expect(";")
        value = self.expression()
        for sign in ";})":
            self._expect(sign)
        return value

    def _size(self) -> int:
        """Parse `(TYPE)` after `sizeof`, and return the type's size in bytes."""
        self._expect("(")
        words = []
        while not self._accept(")"):
            words.append(self._next().text)
        if not words or not _TYPE_WORDS.issuperset(words) or "struct" in words:
            raise ValueError(f"print fmt: the size of {' '.join(words)} is unknown")
        return _type_of(words, 8 * self._word)[0] // 8

    def _cast(self) -> Expression:
        words = []
        while not self._accept(")"):
            words.append(self._next().text)
        operand = self._unary()
        bits, is_signed = _type_of(words, 8 * self._word)
        wrap = signed if is_signed else unsigned
        if words[:1] == ["struct"] and words[2:] == ["*"]:
            if words[1] not in self._names.sizes:
                raise ValueError(f"print fmt: no struct {words[1]!r}")
            return _Pointer(lambda context: wrap(operand(context), bits), self._names.sizes[words[1]])
        return lambda context: wrap(operand(context), bits)

    def _primary(self) -> Expression:
        token = self._peek()
        if token.kind == "string":
            text = self._string()
            return lambda _context: text
        self._at += 1
        if token.kind == "number":
            number = int(token.text, 0)
            return lambda _context: number
        if token.kind == "char":
            code = ord(_ESCAPES.get(token.text[-1], token.text[-1]) if len(token.text) > 1 else token.text)
            return lambda _context: code
        if token.text in self._locals:
            return self._locals[token.text]
        if token.text == "sizeof":
            size = self._size()
            return lambda _context: size
        if token.text == "REC":
            self._expect("->")
            return self._field(self._next().text)
        if token.text == "NULL":
            return lambda _context: 0
        if variable := self._names.variables.get(token.text):
            return lambda _context: variable()
        if token.text in self._names.constants:
            constant = self._names.constants[token.text]
            return lambda _context: constant
        if token.kind == "name":
            return self._call(token.text)
        raise ValueError(f"print fmt: {token.text!r}")

    def _field(self, name: str) -> Expression:
        field = self._lookup(name)
        if self._accept("["):
            index = self.expression()
            self._expect("]")
            if not field.length:
                raise ValueError(f"print fmt: {name!r} has no length")
            size = field.size // field.length
            return lambda context: context.number(
                field.offset + int(index(context)) * size, size, field.is_signed
            )
        if field.length and field.type.startswith("char"):
            return lambda context: context.text(field.offset, field.size)
        return lambda context: context.number(field.offset, field.size, field.is_signed)

    def _lookup(self, name: str) -> EventField:
        if name not in self._fields:
            raise ValueError(f"print fmt: no field {name!r}")
        return self._fields[name]

    def _call(self, name: str) -> Expression:
        self._expect("(")
        if name == "__get_str":
            field = self._lookup(self._next().text)
            self._expect(")")
            return lambda context: context.text(*_location(context, field))
        if name in ("__print_flags", "__print_symbolic"):
            return self._table(flags=name == "__print_flags")
        if name == "__print_dynamic_array":
            field = self._lookup(self._next().text)
            self._expect(",")
            size = self.expression()
            self._expect(")")
            return _dynamic_elements(field, size)
        if name in _OF_ARRAYS:
            field = self._lookup(self._next().text)
            self._expect(")")
            return _OF_ARRAYS[name](field)
        arguments = [self.expression()]
        while self._accept(","):
            arguments.append(self.expression())
        self._expect(")")
        return self._function(name, arguments)

    def _function(self, name: str, arguments: Sequence[Expression]) -> Expression:
        """Compile a call of the function `name`; raise ValueError if the function is unknown.

        Other methods compile functions that take a field or a table of names, such as __print_flags().
        """
        match name, arguments:
            case "__builtin_expect", (value, _):
                return value
            case (("__print_hex" | "__print_hex_str"), (value, size)):
                text = bytes.hex if name == "__print_hex_str" else lambda data: data.hex(" ")
                return lambda context: text(_bytes_of(value(context), int(size(context))))
            case "__print_array", (value, count, size):
                return lambda context: _array(value(context), int(count(context)), int(size(context)))
            case _, (value,) if name in _SAME:
                return value
            case _, (value,) if name in self._names.functions:
                function = self._names.functions[name]
                return lambda context: function(int(value(context)))
        raise ValueError(f"print fmt: no function {name!r}")

    def _table(self, *, flags: bool) -> Expression:
        """Compile a call of __print_flags() or __print_symbolic(); parse it after the opening parenthesis.

        `flags`: True for __print_flags(), False for __print_symbolic().
        """
        value = self.expression()
        self._expect(",")
        delimiter = ""
        if flags:
            delimiter = self._string()
            self._expect(",")
        names: list[tuple[Expression, str]] = []
        while not self._accept(")"):
            self._expect("{")
            mask = self.expression()
            self._expect(",")
            if self._peek().kind == "string":
                names.append((mask, self._string()))
            else:
                # This is the null pointer at the table's end.
                self.expression()
            self._expect("}")
            self._accept(",")
        return _flag_names(value, delimiter, names) if flags else _symbol_name(value, names)


def _flag_names(value: Expression, delimiter: str, names: Sequence[tuple[Expression, str]]) -> Expression:
    """Compile __print_flags() of `value`.

    `names`: (mask, name) of each flag. `delimiter`: the text between names.

    Mirrors: kernel/trace/trace_output.c:trace_print_flags_seq (v6.1).
    """

    def text(context: PrintContext) -> str:
        rest = unsigned(value(context))
        found = []
        for mask_of, name in names:
            mask = unsigned(mask_of(context)) if rest else 0
            if rest and rest & mask == mask:
                found.append(name)
                rest &= ~mask
        if rest:
            found.append(f"{rest:#x}")
        return delimiter.join(found)

    return text


def _symbol_name(value: Expression, names: Sequence[tuple[Expression, str]]) -> Expression:
    """Compile __print_symbolic() of `value`. `names`: (number, name) of each symbol.

    Mirrors: kernel/trace/trace_output.c:trace_print_symbols_seq (v6.1).
    """

    def text(context: PrintContext) -> str:
        number = unsigned(value(context))
        return next((name for known, name in names if unsigned(known(context)) == number), f"{number:#x}")

    return text


def _apply(
    sign: str, operation: Callable[[int, int], int], left: Expression, right: Expression
) -> Expression:
    if isinstance(left, _Pointer) and sign in "+-":
        size = left.size
        return _Pointer(lambda context: operation(int(left(context)), size * int(right(context))), size)
    return lambda context: operation(int(left(context)), int(right(context)))


def _location(context: PrintContext, field: EventField) -> tuple[int, int]:
    """Return offset and size, in bytes, of the dynamic array that a __data_loc field describes.

    The offset is from the start of the entry.
    """
    location = context.number(field.offset, 4, signed=False)
    return location & 0xFFFF, location >> 16


def _dynamic_array(field: EventField) -> Expression:
    """Compile __get_dynamic_array(), whose value is all bytes of the array as one little-endian number."""
    return lambda context: context.number(*_location(context, field), signed=False)


def _dynamic_length(field: EventField) -> Expression:
    return lambda context: _location(context, field)[1]


def _dynamic_elements(field: EventField, size: Expression) -> Expression:
    """Compile __print_dynamic_array(). `size` is the expression for an element's size in bytes."""
    value, length = _dynamic_array(field), _dynamic_length(field)

    def text(context: PrintContext) -> str:
        each = max(int(size(context)), 1)
        return _array(value(context), int(length(context)) // each, each)

    return text


def _bitmask(field: EventField) -> Expression:
    """Compile __get_bitmask(): the mask in hexadecimal, with commas between groups of 8 digits.

    Mirrors: kernel/trace/trace_output.c:trace_print_bitmask_seq (v6.1).
    """

    def text(context: PrintContext) -> str:
        offset, size = _location(context, field)
        digits = f"{context.number(offset, size, signed=False):0{2 * size}x}"
        return ",".join(digits[at : at + 8] for at in range(0, len(digits), 8))

    return text


_OF_ARRAYS: Mapping[str, Callable[[EventField], Expression]] = {
    "__get_dynamic_array": _dynamic_array,
    "__get_dynamic_array_len": _dynamic_length,
    "__get_bitmask": _bitmask,
    "__get_cpumask": _bitmask,
}


def _bytes_of(value: Value, size: int) -> bytes:
    """Return the first `size` bytes of an array that is represented as a little-endian number.

    Hazard: the size comes from a record and may have any value. The result has at most PAGE_SIZE bytes,
    because a line of text is not longer.
    """
    size = max(0, min(size, PAGE_SIZE))
    return unsigned(value, 8 * size).to_bytes(size, "little")


def _array(value: Value, count: int, size: int) -> str:
    """Return the text of an array of `count` elements of `size` bytes, such as `{0x1,0x2}`.

    `value`: all bytes of the array as one little-endian number.
    Mirrors: kernel/trace/trace_output.c:trace_print_array_seq (v6.1).
    """
    data = _bytes_of(value, count * size)
    words = (int.from_bytes(data[at : at + size], "little") for at in range(0, len(data), size or 1))
    return "{" + ",".join(f"{word:#x}" for word in words) + "}"


def _type_of(words: Sequence[str], word_bits: int) -> tuple[int, bool]:
    """Return (width in bits, whether signed) for the C type whose text consists of `words`.

    `word_bits`: size of a long and of a pointer in bits.
    """
    if "*" in words:
        return word_bits, False
    if "long" in words or "size_t" in words:
        bits = 64 if words.count("long") == 2 else word_bits
    else:
        bits = next((size for name, size in _BITS.items() if name in words), 32)
    return bits, not ({"unsigned", "size_t", "gfp_t", "bool", "u8", "u16", "u32", "u64"} & set(words))
