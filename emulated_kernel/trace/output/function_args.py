"""FunctionArgs: the text of a traced function's arguments, by the function's prototype in the BTF."""

from __future__ import annotations

import errno
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING

from emulated_kernel.trace.symbols import KernelSymbols
from emulated_kernel.util.errors import KernelError

if TYPE_CHECKING:
    from emulated_kernel.image.linux.btf import Btf, Member

COUNT = 6
"""Number of words for arguments in the record of a call, if the record has arguments.

Mirrors: include/linux/ftrace_regs.h:FTRACE_REGS_MAX_ARGS (v7.2).
"""


class FunctionArgs:
    """Printer of the arguments of functions, for the options func-args and funcgraph-args.

    Mirrors: kernel/trace/trace_output.c:print_function_args (v7.2).
    """

    def __init__(self, symbols: KernelSymbols, types: Callable[[], Btf | None], word_size: int) -> None:
        """Create a printer for a kernel with words of `word_size` bytes.

        `types` returns the kernel's BTF, or None if the kernel has none.
        """
        self._symbols = symbols
        self._types = types
        self._word = word_size

    def text(self, func: int, payload: bytes) -> str:
        """Return the arguments of the function at the address `func`, in parentheses.

        `payload`: the arguments' words in the record.

        Return "()" for a function without parameters or one that is not in the BTF, and "" if the record has
        no words for arguments.
        """
        if len(payload) < COUNT * self._word:
            return ""
        words = [
            int.from_bytes(payload[at : at + self._word], "little")
            for at in range(0, COUNT * self._word, self._word)
        ]
        return f"({''.join(self._parts(func, words))})"

    def _parts(self, func: int, words: Sequence[int]) -> Iterator[str]:
        btf = self._types()
        found = self._symbols.lookup(func)
        if btf is None or found is None:
            return
        try:
            _, parameters = btf.prototype(found.symbol.name)
        except KernelError as error:
            if error.errno != errno.ENOENT:
                raise
            return
        at = 0
        for number, parameter in enumerate(parameters):
            if at > COUNT:
                return
            yield ", " if number else ""
            if at == COUNT:
                yield "..."
                return
            at += yield from self._argument(btf, parameter, words[at:])

    def _argument(self, btf: Btf, parameter: Member, words: Sequence[int]) -> Generator[str, None, int]:
        """Yield the text of the argument for `parameter` in pieces.

        `words`: the words of the record from the start of the argument's value on. The generator's return
        value is the number of words that the argument takes.
        """
        # Imported here, because most mounts show no arguments.
        from emulated_kernel.image.linux.btf import Kind

        type_ = btf.resolve(parameter.type)
        kind = btf.kind(type_)
        value = words[0]
        signed = value - (value >> 8 * self._word - 1 << 8 * self._word)
        yield f"{parameter.name}="
        if kind in (Kind.VOID, Kind.PTR):
            yield f"{'?' if kind is Kind.VOID else ''}{value:#x}"
        elif kind is Kind.INT:
            yield str(signed) if btf.int_encoding(type_)[0] else f"{value:#x}"
        elif kind is Kind.ENUM:
            names = [name for name, each in btf.enumerators(type_).items() if each == signed]
            yield f"{signed} [{names[0]}]" if names else str(signed)
        else:
            count = max(-(-btf.type(type_).size_or_type // self._word), 1)
            shown = ":".join(f"{word:#x}" for word in words[:count])
            yield f"({kind.name})[{shown}{':...' if count > len(words) else ''}]"
            return count
        return 1
