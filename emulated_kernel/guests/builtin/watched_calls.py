"""WatchedCalls: the kinds of clients' system calls in which a probe or tracer can be hit."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.image.builtin_image import KernelImage
from emulated_kernel.image.call_graph import Calls, FunctionCalls
from emulated_kernel.machine.text.text import WORD_SIZE, Text

_MAX_WORDS = 64
"""If more words of the text than this are patched, all calls are watched; a word has WORD_SIZE bytes.

Otherwise the functions that contain the words decide which kinds of calls are watched.
"""


class WatchedCalls:
    """Finds the kinds of clients' system calls that a probe or tracer could notice. Lock: not used.

    A call is watched if it can execute patched text.
    If a module is loaded, all calls are watched while any text is patched, because the kernel may call the
    module's code from anywhere.
    """

    def __init__(self, text: Text, image: KernelImage) -> None:
        self._text = text
        self._functions = FunctionCalls(image)
        self._ledger = text.ledger
        self._words = self._ledger.words
        self._kernels_count = text.count
        self._found = 0, 0
        """Result of the last search: (number of text changes until then, mask of kinds of system calls).

        The mask has the kinds of calls that can execute patched text. Both items are in one tuple, so that a
        thread without the lock replaces both at once.
        """
        self.before_more: list[Callable[[bool], object]] = []
        """Functions to call before patched text can be executed by more kinds of system calls.

        Each function opens the clients' open files in the guest too, and runs the guest for that. Its
        argument is True if Calls.NAMES is one of the added kinds.
        """
        text.before_change = self._before_change

    def include(self, kind: int) -> bool:
        """Return True if a probe or tracer could notice a system call of the kind `kind`, a bit of Calls.

        If no text is patched, return False. Otherwise, if a module is loaded, return True for all kinds.
        """
        if not self._words:
            return False
        return self._text.count != self._kernels_count or bool(self._patched() & kind)

    def execute_patches(self, kind: int) -> bool:
        """Return True if a system call of the kind `kind` can execute patched text of the kernel itself."""
        return bool(self._patched() & kind)

    def _patched(self) -> int:
        """Return the mask of the kinds of calls that can execute patched text."""
        changes, patched = self._found
        now = self._ledger.changes
        if changes != now:
            patched = self._find()
            self._found = now, patched
        return patched

    def _find(self) -> int:
        if len(self._words) > _MAX_WORDS:
            return Calls.ALL
        found = 0
        # A copy: another thread may change the text meanwhile. The length is checked first, because copying
        # all words at each change would make arming n probes quadratic.
        for word, kept in list(self._words.items()):
            # A word may contain parts of several functions.
            start = word * WORD_SIZE
            for at, differs in enumerate((kept >> 8 * WORD_SIZE).to_bytes(WORD_SIZE, "little")):
                if differs:
                    found |= self._functions.of(start + at)
        return found

    def _before_change(self, address: int, size: int) -> None:
        patched = self._patched()
        more = self._functions.of(address) | self._functions.of(address + size - 1)
        if len(self._words) + (size + 2 * WORD_SIZE - 2) // WORD_SIZE > _MAX_WORDS:
            # Afterwards _find() may give up.
            more = Calls.ALL
        more &= ~patched
        if more:
            self._tell(names_end=bool(more & Calls.NAMES))

    def open_files(self) -> None:
        """Open in the guest all files that clients have open but that are not open in the guest. Lock: held.

        Call this before a change that patches more text.
        """
        self._tell(names_end=False)

    def _tell(self, *, names_end: bool) -> None:
        for call in self.before_more:
            call(names_end)
