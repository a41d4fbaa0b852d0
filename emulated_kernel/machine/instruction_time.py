"""InstructionTime: a time in memory that each guest instruction, trap and host handler advances."""

from __future__ import annotations

import ctypes
import errno
from typing import TYPE_CHECKING

from emulated_kernel.machine.native.host_code import routine_address
from emulated_kernel.machine.unicorn_engine import HOOK_CODE, Engine
from emulated_kernel.util.errors import KernelError

if TYPE_CHECKING:
    from emulated_kernel.machine.host_copies import HostCopies
    from emulated_kernel.machine.interrupts.hooks import TrapHooks

INSTRUCTION_NS = 1
"""Nanoseconds of an instruction: one cycle at 1 GHz. The host's routine `count` adds them."""
TRAP_NS = 200
"""Nanoseconds that a trap or exception takes, in addition to the guest's instructions."""
HANDLER_NS = 500
"""Nanoseconds that a handler of the host in Python takes, in addition to its trap."""


class InstructionTime:
    """Adds nanoseconds to a time for each guest instruction, trap and handler, without Python.

    The counted time is exact and depends only on what the guest executes. A run of the guest is several times
    slower while instructions are counted.
    """

    def __init__(
        self, engine: Engine, hooks: TrapHooks, address: int, copies: HostCopies | None = None
    ) -> None:
        """Prepare to count. `address`: address in this process of the u64 that holds the time.

        `copies`: object that makes the host execute the guest's copies, but not while instructions are
        counted. None if the host executes none.
        """
        self._engine = engine
        self._hooks = hooks
        self._address = address
        self._copies = copies
        self._hook: ctypes.c_void_p | None = None

    def start(self) -> None:
        """Count instructions, traps and handlers from now on; the guest must not run.

        Raises: KernelError EOPNOTSUPP (the host has no machine-code routines for instructions and traps).
        """
        routine = routine_address("count")
        if routine is None or not self._hooks.is_native:
            raise KernelError(
                errno.EOPNOTSUPP, "no model clock: this host has no routine that counts instructions"
            )
        if self._hook is None:
            self._hook = self._engine.add_hook(HOOK_CODE, ctypes.c_void_p(routine), data=self._address)
            self._hooks.charge(self._address, TRAP_NS, HANDLER_NS)
            self._leave_copies(True)

    def stop(self) -> None:
        """Stop counting; the guest must not run."""
        if self._hook is not None:
            self._engine.remove_hook(self._hook)
            self._hook = None
            self._hooks.stop_charging()
            self._leave_copies(False)

    def _leave_copies(self, left: bool) -> None:
        """Make the guest execute repeated copies if `left` is True; otherwise make the host execute them.

        All code is then translated again, so that it calls the hooks that are now set.
        """
        if self._copies is not None:
            self._copies.leave_to_guest(left)
        self._engine.flush_code()
