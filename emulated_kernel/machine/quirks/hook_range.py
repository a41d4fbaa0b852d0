"""HookRange: turns a Unicorn hook off and on by changing its address range in Unicorn's memory.

Unicorn's API cannot change the range after the hook was added.
"""

from __future__ import annotations

import ctypes
import struct

from emulated_kernel.machine.quirks.harness import own_memory

_HOOK_SIZE = 64
"""Size in bytes of the start of Unicorn's struct hook, which contains the fields `begin` and `end`."""
_NOWHERE = 1 << 63, 1 << 63
"""Range that turns a hook off: first and last address, not canonical, so that no code is there."""


class HookRange:
    """The address range of a Unicorn hook. The range can be replaced by one without code, and restored.

    Unicorn: code calls a hook only if the hook's range contained the code's address when the code was
    translated. So changing the range, and dropping the translated code, turns the hook off and on.
    """

    def __init__(self, hook: int, at: range) -> None:
        """Find the fields with the range `at` in Unicorn's struct hook, which is at the address `hook`."""
        self._at = at[0], at[-1]
        place = own_memory(hook, _HOOK_SIZE).find(struct.pack("<2Q", *self._at))
        self._cells = None if place < 0 else (ctypes.c_uint64 * 2).from_address(hook + place)

    def use(self, on: bool) -> None:
        """Restore the hook's range if `on` is True; otherwise set a range that contains no code.

        The caller must drop translated code afterwards. If the hook's range was not found, the range stays.
        """
        if self._cells is not None:
            self._cells[0], self._cells[1] = self._at if on else _NOWHERE
