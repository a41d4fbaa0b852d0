"""Views of a struct pt_regs that guest code has saved; handlers read and change it in guest memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from emulated_kernel.machine.memory.guest_memory import GuestMemory

_KEPT = 64


class PtRegsView:
    """One saved struct pt_regs, valid until the guest continues. The registers are attributes, as in Regs."""

    __slots__ = ("_words",)

    def __init__(self, words: memoryview) -> None:
        self._words = words


class PtRegsFrames:
    """Cache of PtRegsView objects by address. Linux: the handler gets a pointer to the struct pt_regs."""

    def __init__(self, memory: GuestMemory, names: Sequence[str], word_size: int) -> None:
        self._view = memory.view
        self._size = len(names) * word_size
        self._wide = word_size == 8
        mask = (1 << 8 * word_size) - 1
        fields = {name: _word(index, mask) for index, name in enumerate(names)}
        self._class: Callable[[memoryview], Any] = type(
            "SavedPtRegs", (PtRegsView,), {"__slots__": (), **fields}
        )
        self._known: dict[int, Any] = {}

    def at(self, address: int) -> Any:
        """Return the struct pt_regs at a stack address. Views are cached, because stacks stay mapped.

        Raises: MemoryFault (the address isn't in one piece of writable memory).
        """
        frame = self._known.get(address)
        if frame is None:
            if len(self._known) >= _KEPT:
                self._known.clear()
            view = self._view(address, self._size)
            frame = self._class(view.cast("Q") if self._wide else view.cast("I"))
            self._known[address] = frame
        return frame


def _word(index: int, mask: int) -> property:
    def get(self: PtRegsView) -> int:
        return self._words[index]

    def put(self: PtRegsView, value: int) -> None:
        self._words[index] = value & mask

    return property(get, put)
