"""Functions: the traceable functions of the kernel and of loaded modules, and their selection by name."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from itertools import islice

from emulated_kernel.trace.context.probe_hit import ProbeHit
from emulated_kernel.trace.filter.pattern import MatchType, StringPattern, classify_pattern, parse_pattern
from emulated_kernel.trace.text.numbers import simple_strtoul
from emulated_kernel.util.fast_dataclass import dataclass

CallHandler = Callable[[int, ProbeHit], None]
"""Handler of a traced function's calls; its arguments are the fentry site and the hit."""


@dataclass(frozen=True, slots=True)
class TraceableFunction:
    """A function with a fentry site, at which its calls can be traced."""

    site: int
    """Address of the fentry site."""
    name: str
    module: str | None = None
    """Name of the function's module; None for the kernel itself."""
    is_dropped: bool = False
    """Whether the function is disabled: name patterns do not match it, and its calls are not traced."""

    @property
    def shown(self) -> str:
        """The function's line in available_filter_functions and filters, without a newline.

        Mirrors: kernel/trace/ftrace.c:print_rec (v6.1).
        """
        return self.name if self.module is None else f"{self.name} [{self.module}]"


class FunctionWatcher(ABC):
    """Base class of objects that keep a selection of functions, and adapt it when modules come or go."""

    def module_added(self, module: str, /) -> None:  # noqa: B027 - not all watchers need it
        """Add those functions of the new module `module` that the object's filters select.

        By default, do nothing.
        """

    @abstractmethod
    def functions_removed(self, sites: frozenset[int], /) -> None:
        """Remove the functions with the fentry sites `sites` from the selection.

        The text of these functions is about to be freed.
        """


_Entry = str | TraceableFunction
"""A function in the table of Functions. A function of the kernel itself is only a name, to save memory."""


class Functions(Collection[TraceableFunction]):
    """All traceable functions: the kernel's in order of address, then each module's in the order of loading.

    Mirrors: kernel/trace/ftrace.c:ftrace_pages_start (v6.1).
    """

    def __init__(self, functions: Iterable[TraceableFunction], has_module: Callable[[str], bool]) -> None:
        """Create the table of the kernel's functions, without iterating over `functions` yet.

        `has_module` returns True if a module is loaded, even if none of its functions can be traced.
        """
        self._at_boot = functions
        self._of_modules: dict[int, TraceableFunction] = {}
        self.has_module = has_module
        self._watchers: list[FunctionWatcher] = []

    @cached_property
    def _functions(self) -> dict[int, _Entry]:
        """Return a cached map: fentry site -> function, as its name or as a TraceableFunction (see _Entry).

        The map is built when it is first used, because finding the names takes a tenth of a boot's time.
        """
        return {function.site: _entry(function) for function in self._at_boot} | self._of_modules

    def __iter__(self) -> Iterator[TraceableFunction]:
        return (_function(site, entry) for site, entry in self._functions.items())

    def shown(self, index: int) -> Iterator[str]:
        """Yield the line (TraceableFunction.shown) of each function from index `index` on.

        For speed, no TraceableFunction is created for functions of the kernel itself: each read(2) of
        available_filter_functions calls this method.
        """
        entries = islice(self._functions.values(), index, None)
        return (entry if isinstance(entry, str) else entry.shown for entry in entries)

    def __len__(self) -> int:
        return len(self._functions)

    def __contains__(self, function: object) -> bool:
        if not isinstance(function, TraceableFunction) or function.site not in self._functions:
            return False
        return self.at(function.site) == function

    @property
    def sites(self) -> frozenset[int]:
        """The fentry sites of all functions that are not disabled."""
        sites = frozenset(self._functions)
        return sites - self.dropped if self.dropped else sites

    @cached_property
    def dropped(self) -> frozenset[int]:
        """Return the cached set of the fentry sites of disabled functions."""
        entries = self._functions.items()
        return frozenset(site for site, entry in entries if not isinstance(entry, str) and entry.is_dropped)

    def at(self, site: int) -> TraceableFunction:
        """Return the function that has the fentry site `site`."""
        return _function(site, self._functions[site])

    def existing(self, sites: Iterable[int]) -> frozenset[int]:
        """Return the members of `sites` that are fentry sites of existing functions."""
        return frozenset(site for site in sites if site in self._functions)

    def in_order(self, sites: Collection[int]) -> list[int]:
        """Return `sites` in the order of the list of all functions."""
        return list(sites) if len(sites) < 2 else [site for site in self._functions if site in sites]

    @cached_property
    def _by_name(self) -> dict[str, tuple[int, ...] | int]:
        """Return a cached map: name of functions -> fentry site, or tuple of sites if several have it.

        The map is used for patterns without a wildcard.

        Clients write a name for each of thousands of functions, so a linear search would be too slow.
        """
        found: dict[str, tuple[int, ...] | int] = {}
        for site, entry in self._functions.items():
            name = _name(entry)
            before = found.setdefault(name, site)
            if before is not site:
                found[name] = (*(before if isinstance(before, tuple) else (before,)), site)
        return found

    def _named(self, name: bytes) -> Iterable[tuple[int, _Entry]]:
        """Return the functions called `name`, as (fentry site, entry of `_functions`)."""
        sites = self._by_name.get(name.decode("utf-8", "surrogateescape"), ())
        return [(site, self._functions[site]) for site in (sites if isinstance(sites, tuple) else (sites,))]

    def sites_by_name(self, name: str | None) -> Iterable[tuple[str, int]]:
        """Return (name, fentry site) of each function called `name`, or of all functions if `name` is None.

        Disabled functions are left out.
        """
        entries = self._functions.items() if name is None else self._named(os.fsencode(name))
        dropped = self.dropped
        return ((_name(entry), site) for site, entry in entries if site not in dropped)

    def watch(self, watcher: FunctionWatcher) -> None:
        """Call the methods of `watcher` when functions are added or removed from now on."""
        self._watchers.append(watcher)

    def unwatch(self, watcher: FunctionWatcher) -> None:
        """Stop calling the methods of `watcher`."""
        self._watchers.remove(watcher)

    def add(self, module: str, functions: Iterable[TraceableFunction]) -> None:
        """Add the functions of a new module. Mirrors: kernel/trace/ftrace.c:ftrace_module_enable (v6.1)."""
        self._change(self._of_modules | {function.site: function for function in functions})
        for watcher in tuple(self._watchers):
            watcher.module_added(module)

    def remove(self, sites: frozenset[int]) -> None:
        """Remove those functions of a module that have the fentry sites `sites`.

        `sites` are those of all functions of the module, or of the functions in its init text.

        Mirrors: kernel/trace/ftrace.c:ftrace_release_mod, ftrace_free_mem (v6.1).
        """
        gone = sites & self._of_modules.keys()
        self._change({site: each for site, each in self._of_modules.items() if site not in gone})
        if gone:
            for watcher in tuple(self._watchers):
                watcher.functions_removed(gone)

    def _change(self, of_modules: dict[int, TraceableFunction]) -> None:
        if "_functions" in self.__dict__:
            for site in self._of_modules.keys() - of_modules.keys():
                del self._functions[site]
            self._functions.update(of_modules)
        self._of_modules = of_modules
        for cached in ("dropped", "_by_name"):
            self.__dict__.pop(cached, None)

    def matching(self, pattern: bytes, module: bytes | None = None) -> frozenset[int]:
        """Return the fentry sites of the functions whose names match `pattern`.

        `pattern`: a `!` in it is an ordinary character, because callers have removed the `!` of a negation.
        If it begins with a digit, it is a position in the list of all functions, counted from 1. Only a
        position can select a disabled function.

        `module`: a pattern for module names, which limits the result to functions of matching modules. If it
        begins with "!", the result has only the other functions, including those of the kernel itself. The
        pattern "" matches all modules, so "!" leaves only the functions of the kernel itself. If `module` is
        given and `pattern` is empty, all names match.

        Mirrors: kernel/trace/ftrace.c:match_records, ftrace_match_record (v6.1).
        """
        if pattern[:1].isdigit():
            index = simple_strtoul(pattern.decode("latin-1"))[0] - 1
            return frozenset(islice(self._functions, index, index + 1) if 0 <= index < len(self) else ())
        wanted = classify_pattern(pattern)
        matches_all = module is not None and not wanted.text
        functions: Iterable[tuple[int, _Entry]] = self._functions.items()
        if wanted.type is MatchType.FULL and not matches_all:
            functions = self._named(wanted.text)
        dropped = self.dropped
        chosen = [(site, entry) for site, entry in functions if site not in dropped]
        if module is not None:
            module_pattern, is_excluded = parse_pattern(module)
            chosen = [each for each in chosen if _belongs(each[1], module_pattern) is not is_excluded]
        return frozenset(site for site, entry in chosen if matches_all or _matches(wanted, _name(entry)))


def _entry(function: TraceableFunction) -> _Entry:
    return function if function.module is not None or function.is_dropped else function.name


def _function(site: int, entry: _Entry) -> TraceableFunction:
    return TraceableFunction(site, entry) if isinstance(entry, str) else entry


def _name(entry: _Entry) -> str:
    return entry if isinstance(entry, str) else entry.name


def _belongs(entry: _Entry, pattern: StringPattern) -> bool:
    module = None if isinstance(entry, str) else entry.module
    if not pattern.text:
        return module is not None
    return module is not None and _matches(pattern, module)


def _matches(pattern: StringPattern, text: str) -> bool:
    data = text.encode() + b"\0"
    return pattern.matches(data, len(data))
