"""Views of a struct pt_regs that guest code has saved; handlers read and change it in guest memory."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from emulated_kernel.machine.memory.guest_memory import GuestMemory

_CACHE_SIZE = 64


class PtRegsFrames(dict[int, Any]):
    """Stack address -> view of the struct pt_regs there: an object with the registers' names as attributes.

    The first look-up of an address makes its view, which stays valid, because stacks stay mapped. The
    contents are valid until the guest continues. Values are unsigned, and assigned values are truncated.
    In Linux, the handler gets a pointer to the struct pt_regs.
    """

    def __init__(self, memory: GuestMemory, names: Sequence[str], word_size: int) -> None:
        super().__init__()
        self._view = memory.view
        word = ctypes.c_uint64 if word_size == 8 else ctypes.c_uint32
        fields = [(name, word) for name in names]
        self._class: Any = type("SavedPtRegs", (ctypes.Structure,), {"__slots__": (), "_fields_": fields})
        self._size = ctypes.sizeof(self._class)

    def __missing__(self, address: int) -> Any:
        """Make the view of the struct pt_regs at `address`.

        Raises: MemoryFault (the struct does not lie in one piece of writable memory).
        """
        view = self._view(address, self._size)
        if len(self) >= _CACHE_SIZE:
            self.clear()
        frame = self._class.from_buffer(view)
        self[address] = frame
        return frame
