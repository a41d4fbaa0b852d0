"""Sets of functions selected by name patterns: set_ftrace_filter, set_graph_function and similar files.

Each open file that can be written has its own copy of the set. Written words change the copy. The last close
of the file replaces the set by the copy.
"""

from __future__ import annotations

import errno
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol

from emulated_kernel.trace.text.chars import bytes_to_text
from emulated_kernel.trace.text.get_user import FUNCTION_WORD_MAX, WordParser
from emulated_kernel.trace.tracers.available_functions import Functions
from emulated_kernel.trace.tracers.ftrace_hash import FtraceHash
from emulated_kernel.util.errors import KernelError


class WordEdit(ABC):
    """An open file's copy of a set of functions. Written words change the copy, and close() applies it."""

    def __init__(self, *, truncate: bool) -> None:
        self._is_truncated = truncate
        self._parser = WordParser(FUNCTION_WORD_MAX)
        self._executed: list[bytes] = []

    @abstractmethod
    def records_from(self, index: int) -> Iterator[str]:
        """Return the lines that one read(2) of the open file may return; the first has the index `index`."""

    @abstractmethod
    def execute(self, word: bytes) -> None:
        """Apply `word`, which was written to the open file, to the file's copy of the set.

        Raises: KernelError EINVAL (no function matches).
        """

    @abstractmethod
    def put_into_force(self) -> None:
        """Replace the set by the open file's copy."""

    def write(self, data: bytes, position: int) -> int:
        """Execute the first word that ends at a blank or NUL in `data`; return the number of bytes taken.

        The word may have begun in an earlier write. A word that is not ended is kept for the next write or
        close(). `position`: file position of the write; a write at 0 begins a new word.
        Raises: KernelError EINVAL (the word is too long), and the errors of execute().
        Mirrors: kernel/trace/ftrace.c:ftrace_regex_write, ftrace_graph_write (v6.1).
        """
        word, size = self._parser.take(data, is_at_start=position == 0)
        if word:
            self.execute(word)
            self._executed.append(word)
        return size

    @property
    def is_pending(self) -> bool:
        """Whether close() would change the set, or execute a last word."""
        return self._is_truncated or bool(self._executed or self._parser.rest)

    def close(self) -> None:
        """Replace the set by the open file's copy, after execution of a last word that no blank has ended.

        If this word is refused, ignore the error.
        Mirrors: kernel/trace/ftrace.c:ftrace_regex_release, ftrace_graph_release (v6.1).
        """
        if self._parser.rest:
            with suppress(KernelError):
                self.execute(self._parser.rest)
        self.put_into_force()

    def goes_on_from(self, other: WordEdit) -> None:
        """Repeat the changes made through `other`, the WordEdit of the same open file before a reboot."""
        self._parser = other._parser
        if other._is_truncated:
            self.clear()
        for word in other._executed:
            with suppress(KernelError):
                self.execute(word)
        self._executed = other._executed

    @abstractmethod
    def clear(self) -> None:
        """Remove all functions from the open file's copy; close() then replaces the set by the copy."""


class EditedSet(ABC):
    """Base class of a set of functions, which open files change through WordEdit objects."""

    @abstractmethod
    def edit(self, *, truncate: bool) -> WordEdit:
        """Return the set's copy for a file opened for writing; empty if `truncate` (O_TRUNC) is True."""

    def write(self, words: bytes) -> None:
        """Open the file as a client does, write each word of `words`, and close the file.

        Blanks separate the words.

        Raises: KernelError, the error of the first word that is refused.
        """
        edit = self.edit(truncate=False)
        try:
            for word in words.split():
                edit.execute(word)
        finally:
            edit.close()

    def clear(self) -> None:
        """Remove all functions from the set: open the file with O_TRUNC as a client does, and close it."""
        self.edit(truncate=True).close()


class ShownFunctions(Protocol):
    """Interface of a set of functions that a filter file shows."""

    @property
    def sites(self) -> Collection[int]:
        """Addresses of the functions' fentry sites."""

    @property
    def is_empty(self) -> bool:
        """Whether no selection was made; see FunctionSet.is_empty."""


class _ShownSites(NamedTuple):
    """The functions that a file opened for reading shows: those that the set had at the time of the open."""

    sites: frozenset[int]
    is_empty: bool


class FilterEdit(WordEdit):
    """The copy of a FunctionSet in an open file. Mirrors: kernel/trace/ftrace.c:ftrace_regex_open (v6.1)."""

    def __init__(self, target: FunctionSet, *, truncate: bool) -> None:
        super().__init__(truncate=truncate)
        self._target = target
        self.sites = set(target.sites)
        self.lost_functions = target.lost_functions
        """Value of FunctionSet.lost_functions when the file was opened; False after clear()."""
        self.waits = target.waits
        """Value of FunctionSet.waits when the file was opened; False after clear()."""
        self.has_awaited = False
        """Whether writes to this file, or O_TRUNC, have changed FunctionSet.awaited."""
        if truncate:
            self.clear()

    def clear(self) -> None:
        """Remove all functions from the open file's copy of the set; the copy then counts as empty.

        Linux: selections that wait for a module are removed at once from the set in use, not only from the
        copy.
        """
        self._is_truncated = True
        self.sites.clear()
        self.lost_functions = False
        self.waits = False
        self.has_awaited = bool(self._target.awaited)
        self._target.awaited = []

    @property
    def is_empty(self) -> bool:
        """Whether no selection was made in the copy; see FunctionSet.is_empty."""
        return not (self.sites or self.lost_functions or self.waits)

    def records_from(self, index: int) -> Iterator[str]:
        return self._target.shown_from(index, self)

    def execute(self, word: bytes) -> None:
        self._target.execute(word, self)

    def put_into_force(self) -> None:
        self._target.replace(self)


class FunctionSet(EditedSet):
    """The functions that a filter file selects. If the set is empty, no selection was made.

    If all functions of a set were removed with their modules, the set selects no function, but does not count
    as empty.
    """

    def __init__(
        self, functions: Functions, title: str, changed: Callable[[], None], *, waiting_counts: bool = True
    ) -> None:
        """Create an empty set. `changed` is called after each change of the set.

        The file shows `title` while the set is empty. `waiting_counts`: whether a set whose only selections
        wait for a module counts as not empty.
        """
        self._functions = functions
        self._title = title
        self._changed = changed
        self._waiting_counts = waiting_counts
        self.lost_functions = False
        """Whether functions of the set were removed with their modules."""
        self.sites: frozenset[int] = frozenset()
        self.awaited: list[tuple[bytes, bytes]] = []
        """Selections that wait for a module, latest first, as (pattern of functions, name of the module)."""

    @property
    def is_empty(self) -> bool:
        """Whether no selection was made.

        A set without functions still has a selection if it lost functions with their modules, or if `waits`
        is True.
        Mirrors: kernel/trace/trace.h:ftrace_hash_empty (v6.1).
        """
        return not (self.sites or self.lost_functions or self.waits)

    @property
    def waits(self) -> bool:
        """Whether selections of the set wait for a module, and make the set count as not empty.

        The value is False if __init__() was called with `waiting_counts` False.
        """
        return self._waiting_counts and bool(self.awaited)

    def edit(self, *, truncate: bool) -> FilterEdit:
        return FilterEdit(self, truncate=truncate)

    @abstractmethod
    def execute(self, word: bytes, edit: FilterEdit) -> None:
        """Apply `word`, which was written to an open file, to `edit`, the file's copy of the set.

        Raises: KernelError (the word is refused).
        """

    def choose(self, pattern: bytes, edit: FilterEdit) -> None:
        """Add the functions that match `pattern` to the copy `edit`.

        If "!" precedes the pattern, remove these functions from the copy.
        Raises: KernelError EINVAL (no function matches).
        Mirrors: kernel/trace/ftrace.c:ftrace_match_records (v6.1).
        """
        if not self._match(pattern, None, edit.sites):
            raise KernelError(
                errno.EINVAL, f"{bytes_to_text(pattern)}: no function matches; see available_filter_functions"
            )

    def choose_of_module(self, pattern: bytes, module: bytes, edit: FilterEdit) -> None:
        """Execute FUNCTIONS:mod:MODULE: select functions of one module, now or when the module is loaded.

        If "!" precedes the pattern, remove the functions, or the selection that waits for the module.
        Functions are selected in `edit`, the open file's copy of the set, which replaces the set at close().
        Linux: a selection that waits for a module is added to the set, or removed from it, at once. In this
        case, set `edit.has_awaited`.
        Raises: KernelError EINVAL (no function of the loaded module matches, or no such selection waits).
        Mirrors: kernel/trace/ftrace.c:ftrace_mod_callback, cache_mod (v6.1).
        """
        if self._match(pattern, module, edit.sites):
            return
        if pattern.startswith(b"!"):
            self._await_no_more(pattern[1:], module)
        elif self._functions.has_module(bytes_to_text(module)):
            text = bytes_to_text(pattern + b":mod:" + module)
            raise KernelError(errno.EINVAL, f"{text}: no function of the module matches")
        else:
            self.awaited.insert(0, (pattern, module))
        edit.has_awaited = True

    def _match(self, pattern: bytes, module: bytes | None, sites: set[int]) -> bool:
        found = self._functions.matching(pattern.removeprefix(b"!"), module)
        if pattern.startswith(b"!"):
            sites -= found
        else:
            sites |= found
        return bool(found)

    def _await_no_more(self, pattern: bytes, module: bytes) -> None:
        left = [each for each in self.awaited if each[1] != module or pattern not in (b"*", each[0])]
        if len(left) == len(self.awaited):
            text = bytes_to_text(pattern + b":mod:" + module)
            raise KernelError(errno.EINVAL, f"{text}: no such selection waits for the module")
        self.awaited = left

    def replace(self, edit: FilterEdit) -> None:
        """Replace the set by `edit`, the copy in an open file.

        If the set changes, call the function `changed` that was passed to __init__().
        Mirrors: kernel/trace/ftrace.c:ftrace_hash_move_and_update_ops (v6.1).
        """
        sites = self._functions.existing(edit.sites)
        has_lost = edit.lost_functions or len(sites) < len(edit.sites)
        if (sites, has_lost) != (self.sites, self.lost_functions) or edit.has_awaited:
            self.sites = sites
            self.lost_functions = has_lost
            self._changed()

    def module_added(self, name: str) -> None:
        """Apply the selections that waited for the module `name`, because it was loaded.

        Mirrors: kernel/trace/ftrace.c:process_mod_list (v6.1).
        """
        module = name.encode()
        sites = set(self.sites)
        for pattern in [pattern for pattern, of in self.awaited if of == module]:
            self._match(pattern, module, sites)
        self.sites = frozenset(sites)
        self.awaited = [each for each in self.awaited if each[1] != module]

    def functions_removed(self, sites: frozenset[int]) -> None:
        """Remove from the set the functions with the fentry sites `sites`, which no longer exist.

        Mirrors: kernel/trace/ftrace.c:clear_mod_from_hashes (v6.1).
        """
        if sites & self.sites:
            self.sites -= sites
            self.lost_functions = True

    def records(self) -> Iterator[str]:
        """Yield all lines of the file."""
        return self._lines(self)

    def records_at_open(self) -> Callable[[int], Iterator[str]]:
        """Return a function for one open file: it takes a line's index and returns the lines from there on.

        The lines show the set as it is at the time of the open.
        Mirrors: kernel/trace/ftrace.c:ftrace_regex_open (v6.1).
        """
        return partial(self.shown_from, shown=_ShownSites(self.sites, self.is_empty))

    def shown_from(self, index: int, shown: ShownFunctions) -> Iterator[str]:
        """Return the lines of `shown`, the set or its copy in an open file, from line `index` on."""
        return islice(self._lines(shown), index, None)

    def _lines(self, shown: ShownFunctions) -> Iterator[str]:
        """Yield the lines of the set, or of its copy in an open file.

        Mirrors: kernel/trace/ftrace.c:t_start, t_show, t_mod_show (v6.1).
        """
        if shown.is_empty:
            yield f"#### {self._title} ####\n"
        functions = self._functions
        for site in functions.in_order(functions.existing(shown.sites)):
            yield f"{functions.at(site).shown}\n"
        for pattern, module in self.awaited:
            yield f"{bytes_to_text(pattern)}:mod:{bytes_to_text(module)}\n"


class GraphEdit(WordEdit):
    """The copy of a GraphSet in an open file. Mirrors: kernel/trace/ftrace.c:__ftrace_graph_open (v6.1)."""

    def __init__(self, target: GraphSet, *, truncate: bool) -> None:
        super().__init__(truncate=truncate)
        self._target = target
        self.hash = FtraceHash(() if truncate else target.hash)

    def clear(self) -> None:
        self._is_truncated = True
        self.hash = FtraceHash()

    def records_from(self, index: int) -> Iterator[str]:
        """Return the lines of the set from line `index` on, for one read(2).

        Linux: a file that is open for writing also shows the set, not the copy.
        """
        return self._target.records_from(index)

    def execute(self, word: bytes) -> None:
        self._target.execute(word, self.hash)

    def put_into_force(self) -> None:
        self._target.replace(self.hash)


class GraphSet(EditedSet):
    """The functions in set_graph_function or set_graph_notrace.

    Unlike in a FunctionSet, functions of a module can be selected only while it is loaded.
    Mirrors: kernel/trace/ftrace.c:ftrace_graph_set_hash, g_show (v6.1).
    """

    def __init__(self, functions: Functions, title: str, changed: Callable[[], None]) -> None:
        """Create an empty set. `changed` is called after each change of the set.

        The file shows `title` while the set is empty.
        """
        self._functions = functions
        self._title = title
        self._changed = changed
        self.hash = FtraceHash()
        self.sites: frozenset[int] = frozenset()

    def edit(self, *, truncate: bool) -> GraphEdit:
        return GraphEdit(self, truncate=truncate)

    def records_at_open(self) -> Callable[[int], Iterator[str]]:
        """Return a function for one open file: it takes a line's index and returns the lines from there on.

        The lines show the set as it is at the time of each read, not of the open.
        Mirrors: kernel/trace/ftrace.c:g_start (v6.1).
        """
        return self.records_from

    def records_from(self, index: int) -> Iterator[str]:
        """Return the lines of the file from line `index` on, for one read(2)."""
        return islice(self.records(), index, None)

    def records(self) -> Iterator[str]:
        """Yield the lines of the file, in the order of the hash."""
        if not self.sites:
            yield f"#### {self._title} ####\n"
        for site in self.hash:
            yield f"{self._functions.at(site).shown}\n"

    def execute(self, word: bytes, chosen: FtraceHash) -> None:
        """Add the functions that match `word` to `chosen`, or remove them if `word` begins with "!".

        `chosen`: an open file's copy of the set.
        Raises: KernelError EINVAL (no function matches).
        """
        pattern = word.removeprefix(b"!")
        # Linux: a number matches no function here. In other filters, it is a position in the list.
        found = frozenset() if pattern[:1].isdigit() else self._functions.matching(pattern)
        if pattern != word:
            found = frozenset(site for site in found if site in chosen)
        if not found:
            raise KernelError(
                errno.EINVAL, f"{bytes_to_text(word)}: no function matches; see available_filter_functions"
            )
        for site in self._functions.in_order(found):
            if pattern != word:
                chosen.remove(site)
            elif site not in chosen:
                chosen.add(site)

    def replace(self, chosen: FtraceHash) -> None:
        """Replace the set by `chosen`, the copy in an open file."""
        self._set(chosen, self._functions.existing(chosen))

    def functions_removed(self, sites: frozenset[int]) -> None:
        """Remove from the set the functions with the fentry sites `sites`, which no longer exist.

        If no function is left, the set counts as empty; a FunctionSet does not.
        """
        self._set(self.hash, self.sites - sites)

    def _set(self, chosen: FtraceHash, sites: frozenset[int]) -> None:
        self.hash = FtraceHash.moved(site for site in chosen if site in sites)
        if sites != self.sites:
            self.sites = sites
            self._changed()
