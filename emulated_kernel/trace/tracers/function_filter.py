"""Sets of functions selected by name patterns: set_ftrace_filter, set_graph_function and similar files."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator

from emulated_kernel.trace.text.chars import bytes_to_text
from emulated_kernel.trace.text.get_user import FUNCTION_WORD_MAX, take_word
from emulated_kernel.trace.tracers.available_functions import Functions
from emulated_kernel.util.errors import KernelError


class FunctionSet:
    """The functions that a filter file selects. An empty set means that no selection was made.

    If all functions of a set were removed with their modules, the set is not empty: it selects nothing until
    it is cleared.
    """

    def __init__(
        self, functions: Functions, title: str, changed: Callable[[], None], *, waiting_counts: bool = True
    ) -> None:
        """Create an empty set; `title` is shown while it is empty.

        If `waiting_counts`, a set that waits for a module is not empty.
        """
        self._functions = functions
        self._title = title
        self._changed = changed
        self._waiting_counts = waiting_counts
        self._lost_functions = False
        self.sites: frozenset[int] = frozenset()
        self.awaited: list[tuple[bytes, bytes]] = []
        """Selections that wait for a module, the latest first: (pattern of functions, name of the module)."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was selected. Mirrors: kernel/trace/ftrace.c:ftrace_hash_empty (v6.1)."""
        return not (self.sites or self._lost_functions or (self._waiting_counts and self.awaited))

    def choose(self, pattern: bytes) -> None:
        """Add the functions that match; with "!" before the pattern, remove them.

        Raises: KernelError EINVAL (no function matches). Mirrors: ftrace_match_records (v6.1).
        """
        if not self._match(pattern, None):
            raise KernelError(
                errno.EINVAL, f"{bytes_to_text(pattern)}: no function matches; see available_filter_functions"
            )
        self._changed()

    def choose_of_module(self, pattern: bytes, module: bytes) -> None:
        """Execute FUNCTIONS:mod:MODULE: select matching functions of one module, now or when it is loaded.

        With "!" before the pattern, remove the functions, or the selection that waits for the module.
        Raises: KernelError EINVAL. Mirrors: kernel/trace/ftrace.c:ftrace_mod_callback, cache_mod (v6.1).
        """
        if self._match(pattern, module):
            self._changed()
        elif pattern.startswith(b"!"):
            self._await_no_more(pattern[1:], module)
        elif self._functions.has_module(bytes_to_text(module)):
            raise KernelError(errno.EINVAL, f"{bytes_to_text(pattern)}: no function of the module matches")
        else:
            self.awaited.insert(0, (pattern, module))
            self._changed()

    def _match(self, pattern: bytes, module: bytes | None) -> bool:
        found = self._functions.matching(pattern.removeprefix(b"!"), module)
        self.sites = self.sites - found if pattern.startswith(b"!") else self.sites | found
        return bool(found)

    def _await_no_more(self, pattern: bytes, module: bytes) -> None:
        left = [each for each in self.awaited if each[1] != module or pattern not in (b"*", each[0])]
        if len(left) == len(self.awaited):
            text = bytes_to_text(pattern + b":mod:" + module)
            raise KernelError(errno.EINVAL, f"{text}: no such selection waits for the module")
        self.awaited = left
        self._changed()

    def module_came(self, name: str) -> None:
        """Select the functions that waited for this module.

        Mirrors: kernel/trace/ftrace.c:process_mod_list (v6.1).
        """
        module = name.encode()
        for pattern in [pattern for pattern, of in self.awaited if of == module]:
            self._match(pattern, module)
        self.awaited = [each for each in self.awaited if each[1] != module]

    def functions_went(self, sites: frozenset[int]) -> None:
        """Remove functions that no longer exist.

        Mirrors: kernel/trace/ftrace.c:clear_mod_from_hashes (v6.1).
        """
        if sites & self.sites:
            self.sites -= sites
            self._lost_functions = True

    def clear(self) -> None:
        """Remove all selections, as opening for writing with O_TRUNC does."""
        if self.is_empty and not self.awaited:
            return
        self.sites = frozenset()
        self.awaited = []
        self._lost_functions = False
        self._changed()

    def records(self) -> Iterator[str]:
        """Yield the lines of the file. Mirrors: kernel/trace/ftrace.c:t_start, t_show, t_mod_show (v6.1)."""
        if self.is_empty:
            yield f"#### {self._title} ####\n"
        for function in self._functions:
            if function.site in self.sites:
                yield f"{function.shown}\n"
        for pattern, module in self.awaited:
            yield f"{bytes_to_text(pattern)}:mod:{bytes_to_text(module)}\n"


class GraphSet(FunctionSet):
    """A file of functions that does not wait for modules.

    Names and globs add functions; with `!` they remove them.
    Deviates: a write takes effect at once; Linux waits for the file's last close.
    Mirrors: kernel/trace/ftrace.c:ftrace_graph_write, ftrace_graph_set_hash, g_show (v6.1).
    """

    def write(self, data: bytes) -> int:
        """Execute the first word of one write to the file, and return the bytes taken.

        Raises: KernelError EINVAL (no function matches).
        """
        word, size = take_word(data, FUNCTION_WORD_MAX)
        if word:
            self._choose(word)
        return size

    def _choose(self, word: bytes) -> None:
        pattern = word.removeprefix(b"!")
        # Linux: numbers match nothing here; in other filters they are positions in the list.
        found = frozenset() if pattern[:1].isdigit() else self._functions.matching(pattern)
        if pattern != word:
            found &= self.sites
        if not found:
            raise KernelError(
                errno.EINVAL, f"{bytes_to_text(word)}: no function matches; see available_filter_functions"
            )
        self._set(self.sites | found if pattern == word else self.sites - found)

    def _set(self, sites: frozenset[int]) -> None:
        if sites != self.sites:
            self.sites = sites
            self._changed()

    def functions_went(self, sites: frozenset[int]) -> None:
        """Remove functions that no longer exist. A set that loses its last function becomes empty."""
        self._set(self.sites - sites)
