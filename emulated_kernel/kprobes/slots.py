"""Insn slots: where copies of probed instructions are run out of line."""

from __future__ import annotations

import errno
from typing import Protocol

from emulated_kernel.abi import GuestAddr
from emulated_kernel.errors import KernelError
from emulated_kernel.machine.traps import HardwareError


class SlotText(Protocol):
    """What slots need of the machine's text; freed memory is filled with breakpoints."""

    def alloc_text(self, size: int) -> int: ...

    def free_text(self, va: int) -> None: ...

    def poke(self, va: int, data: bytes) -> None: ...


class InsnSlots:
    """Slots of one size from the machine's executable memory.

    Mirrors: kernel/kprobes.c:__get_insn_slot, __free_insn_slot (v6.1). A freed slot can be used again
    at once: probes are only unregistered while no CPU stands between a hit and its step's end.
    """

    def __init__(self, text: SlotText, size: int) -> None:
        self._text = text
        self._size = size
        self.used = 0

    def get(self) -> GuestAddr:
        """Reserve a slot. Raises: KernelError ENOMEM."""
        try:
            slot = self._text.alloc_text(self._size)
        except HardwareError as error:
            raise KernelError(errno.ENOMEM, "no executable memory left for insn slots") from error
        self.used += 1
        return GuestAddr(slot)

    def put(self, slot: int) -> None:
        self._text.free_text(slot)
        self.used -= 1
