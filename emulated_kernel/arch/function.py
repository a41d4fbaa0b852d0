"""What a verdict is computed from: a function's bytes, and the kernel's tables about it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

_EMPTY_RANGE = range(0)


@dataclass(frozen=True, slots=True)
class Site:
    """A piece of text that somebody else patches."""

    addr: int
    size: int

    def overlaps(self, first: int, last: int) -> bool:
        """Whether a byte of it lies in first..last, both inclusive."""
        return self.addr <= last and self.addr + self.size > first


@dataclass(frozen=True, eq=False)
class Function:
    """A symbol of the text and all table entries inside it; addresses are absolute.

    `size` is kallsyms' size, so padding up to the next symbol belongs to it.
    """

    name: str
    addr: int
    size: int
    code: bytes
    """The text in memory without any probe; shorter than `size` where it couldn't be read."""
    blacklisted: bool = False
    """In the kprobe blacklist (NOKPROBE_SYMBOL, .kprobes.text, .entry.text, .noinstr.text)."""
    fentry_sites: frozenset[int] = frozenset()
    """ftrace's mcount locations."""
    exception_entries: frozenset[int] = frozenset()
    """Instructions that have a fixup in __ex_table."""
    bug_entries: frozenset[int] = frozenset()
    """The ud2 instructions of __bug_table."""
    jump_labels: tuple[Site, ...] = ()
    static_calls: tuple[Site, ...] = ()

    @property
    def end(self) -> int:
        """Address of the first byte behind it."""
        return self.addr + self.size

    @property
    def traced(self) -> bool:
        """Whether ftrace could trace it; notrace functions have no fentry site."""
        return bool(self.fentry_sites)


@dataclass(frozen=True, slots=True)
class TextLayout:
    """Address ranges of the kernel that rules refer to."""

    text: range
    """_stext.._etext."""
    image_end: int
    """_end: no symbol lies there or behind it."""
    entry_text: range = _EMPTY_RANGE
    thunks: range = _EMPTY_RANGE
    """Indirect- and return-thunks; its end counts as inside, as Linux compares."""
    modules: range = _EMPTY_RANGE
    """Where modules can be loaded."""

    def in_image(self, addr: int) -> bool:
        """Mirrors: include/asm-generic/sections.h:is_kernel (v6.1), which kallsyms asks first."""
        return self.text.start <= addr < self.image_end


@dataclass(frozen=True)
class FunctionTable:
    """The functions of an image, found by address or by name."""

    layout: TextLayout
    functions: tuple[Function, ...]
    """Sorted by address; one for each address (the first alias)."""
    complete: bool = True
    """Whether a name that isn't here doesn't exist; False for a sample of a kernel's functions."""
    _starts: list[int] = field(init=False, repr=False)
    _names: Mapping[str, Function] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_starts", [function.addr for function in self.functions])
        object.__setattr__(self, "_names", {function.name: function for function in self.functions})

    @classmethod
    def build(
        cls, layout: TextLayout, functions: Iterable[Function], *, complete: bool = True
    ) -> FunctionTable:
        """A table of `functions` in any order."""
        return cls(layout, tuple(sorted(functions, key=lambda function: function.addr)), complete)

    def containing(self, addr: int) -> Function | None:
        """The function that kallsyms finds for `addr`."""
        index = bisect_right(self._starts, addr) - 1
        if index < 0 or addr >= self.functions[index].end:
            return None
        return self.functions[index]

    def named(self, name: str) -> Function | None:
        """The function called `name`."""
        return self._names.get(name)

    def parent(self, function: Function) -> Function | None:
        """The function that a split-off part came from: `foo` of `foo.cold` or `foo.part.0`.

        Raises: LookupError if the table is a sample and doesn't tell.
        """
        base, dot, _ = function.name.partition(".")
        parent = self.named(base) if dot else None
        if dot and parent is None and not self.complete:
            raise LookupError(f"{base}, which {function.name} came from, isn't in the table")
        return parent
