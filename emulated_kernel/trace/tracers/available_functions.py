"""The functions whose calls can be traced: the kernel's own, and those of modules, which come and go."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from itertools import islice

from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.filter.pattern import StringPattern, parse_pattern
from emulated_kernel.trace.text.numbers import simple_strtoul
from emulated_kernel.util.fast_dataclass import dataclass

CallHandler = Callable[[int, ProbeHit], None]
"""Told of a call: its fentry site, and the hit."""


@dataclass(frozen=True, slots=True)
class TraceableFunction:
    """A function with a fentry site."""

    site: int
    """The site's address."""
    name: str
    module: str | None = None
    """None for the kernel itself."""
    is_dropped: bool = False
    """Nobody finds it by name, and it is never called."""

    @property
    def shown(self) -> str:
        """Mirrors: kernel/trace/ftrace.c:print_rec (v6.1)."""
        return self.name if self.module is None else f"{self.name} [{self.module}]"


class FunctionWatcher(ABC):
    """Who has chosen among the functions."""

    def module_came(self, module: str, /) -> None:  # noqa: B027 - filters elsewhere may see to it
        """There are new functions."""

    @abstractmethod
    def functions_went(self, sites: frozenset[int], /) -> None:
        """These aren't there any more, but their text still is."""


class Functions(Collection[TraceableFunction]):
    """In the order of their addresses, those of modules behind the kernel's in the order of their coming.

    Mirrors: kernel/trace/ftrace.c:ftrace_pages_start (v6.1).
    """

    def __init__(self, functions: Iterable[TraceableFunction], has_module: Callable[[str], bool]) -> None:
        """`has_module` tells which modules there are, be it that none of their functions can be traced."""
        self._at_boot = functions
        self._of_modules: dict[int, TraceableFunction] = {}
        self.has_module = has_module
        self._watchers: list[FunctionWatcher] = []

    @cached_property
    def _functions(self) -> dict[int, TraceableFunction]:
        """By site. To name a thousand is a tenth of a boot: that waits until somebody asks."""
        return {function.site: function for function in self._at_boot} | self._of_modules

    def __iter__(self) -> Iterator[TraceableFunction]:
        return iter(self._functions.values())

    def __len__(self) -> int:
        return len(self._functions)

    def __contains__(self, function: object) -> bool:
        return isinstance(function, TraceableFunction) and self._functions.get(function.site) == function

    @property
    def sites(self) -> list[int]:
        """All sites that can be called."""
        dropped = self.dropped
        return [site for site in self._functions if site not in dropped]

    @cached_property
    def dropped(self) -> frozenset[int]:
        """Sites that are nobody's."""
        return frozenset(site for site, function in self._functions.items() if function.is_dropped)

    def watch(self, watcher: FunctionWatcher) -> None:
        """Tell this one of changes from now on."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: FunctionWatcher) -> None:
        """Tell it no more."""
        self._watchers.remove(watcher)

    def add(self, module: str, functions: Iterable[TraceableFunction]) -> None:
        """A module came. Mirrors: kernel/trace/ftrace.c:ftrace_module_enable (v6.1)."""
        self._change(self._of_modules | {function.site: function for function in functions})
        for watcher in tuple(self._watchers):
            watcher.module_came(module)

    def remove(self, sites: frozenset[int]) -> None:
        """A module goes, or what its init function was made of.

        Mirrors: kernel/trace/ftrace.c:ftrace_release_mod, ftrace_free_mem (v6.1).
        """
        gone = sites & self._of_modules.keys()
        self._change({site: each for site, each in self._of_modules.items() if site not in gone})
        if gone:
            for watcher in tuple(self._watchers):
                watcher.functions_went(gone)

    def _change(self, of_modules: dict[int, TraceableFunction]) -> None:
        if "_functions" in self.__dict__:
            for site in self._of_modules.keys() - of_modules.keys():
                del self._functions[site]
            self._functions.update(of_modules)
        self._of_modules = of_modules
        self.__dict__.pop("dropped", None)

    def matching(self, pattern: bytes, module: bytes | None = None) -> frozenset[int]:
        """Sites of the functions whose names match; a number means the one that stands there, counted from 1.

        `module` is a pattern too: with "!" before it the functions of others match, the empty one means
        any module. Mirrors: kernel/trace/ftrace.c:match_records, ftrace_match_record (v6.1).
        """
        if pattern[:1].isdigit():
            index = simple_strtoul(pattern.decode("latin-1"))[0] - 1
            return frozenset(islice(self._functions, index, index + 1) if 0 <= index < len(self) else ())
        wanted, _ = parse_pattern(pattern)
        chosen: Iterable[TraceableFunction] = (f for f in self._functions.values() if not f.is_dropped)
        if module is not None:
            of, is_excluded = parse_pattern(module)
            chosen = (f for f in chosen if _belongs(f, of) is not is_excluded)
        matches_all = module is not None and not wanted.text
        return frozenset(f.site for f in chosen if matches_all or _matches(wanted, f.name))


def _belongs(function: TraceableFunction, pattern: StringPattern) -> bool:
    if not pattern.text:
        return function.module is not None
    return function.module is not None and _matches(pattern, function.module)


def _matches(pattern: StringPattern, text: str) -> bool:
    data = text.encode() + b"\0"
    return pattern.matches(data, len(data))
