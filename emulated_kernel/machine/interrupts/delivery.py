"""Delivery of interrupts and exceptions to the guest. The host delivers them, because Unicorn doesn't."""

from __future__ import annotations

import struct

from emulated_kernel.machine.interrupts.hooks import TrapHooks
from emulated_kernel.machine.memory.memory import Memory
from emulated_kernel.machine.traps.trap import MemoryFault, Trap, TrapKind
from emulated_kernel.util.abi import Vector
from emulated_kernel.util.fast_dataclass import replace

_NESTING_LIMIT = 4


class Delivery:
    """Delivers interrupts: pushes an interrupt frame, and makes the guest continue at its interrupt handler.

    The frame has four words, from low to high addresses: vector, error code, flags, ip.
    """

    def __init__(self, hooks: TrapHooks, memory: Memory, handler: int | None, cr2_cell: int | None) -> None:
        """Create the delivery of interrupts to the guest's interrupt handler at address `handler`.

        `handler` is None if the guest has no handler. `cr2_cell` is the address of the guest's variable for
        CR2; None if the guest has no such variable.
        """
        self._engine = hooks.engine
        self._regs = hooks.regs
        self._frame = struct.Struct("<4Q" if hooks.cpu.bits == 64 else "<4I")
        self._cleared = hooks.cpu.cleared_flags
        self._mask = (1 << hooks.cpu.bits) - 1
        self._memory = memory
        self._handler = handler
        self._cr2_cell = cr2_cell
        self._last = (-1, 0)
        self._nested = 0

    def use(self, cr2_cell: int | None) -> None:
        """Deliver interrupts to another CPU from now on: the one that has become the current CPU.

        `cr2_cell`: address of that CPU's variable for page fault addresses; None if the guest has no such
        variable.
        """
        self._cr2_cell = cr2_cell
        self._last = (-1, 0)
        self._nested = 0

    @property
    def possible(self) -> bool:
        """Whether the guest has an interrupt handler."""
        return self._handler is not None

    def enter(self, vector: int, error_code: int, cr2: int) -> None:
        """Interrupt the guest at its current instruction with the exception or interrupt `vector`.

        `error_code`: the exception's error code. `cr2`: faulting address of a page fault.
        Raises: MemoryFault (the guest's stack can't take the frame; nothing was changed).
        """
        regs = self._regs
        flags = regs.flags
        sp = regs.sp - self._frame.size & self._mask
        assert self._handler is not None
        self._memory.write(sp, self._frame.pack(vector, error_code, flags, regs.ip))
        if self._cr2_cell is not None and vector == Vector.PAGE_FAULT:
            self._memory.write_word(self._cr2_cell, cr2)
        regs.sp = sp
        regs.ip = self._handler
        if flags & self._cleared:
            regs.flags = flags & ~self._cleared

    def deliver(self, trap: Trap) -> Trap | None:
        """Deliver an exception to the guest, and return None.

        If the delivery is impossible, return the trap with which the run must end: `trap` itself if the guest
        has no handler, otherwise a double fault.
        """
        if not self.possible:
            return trap
        if self._looping(trap.address):
            return replace(trap, kind=TrapKind.DOUBLE_FAULT)
        try:
            self.enter(trap.vector, trap.error_code, trap.cr2)
        except MemoryFault:
            return replace(trap, kind=TrapKind.DOUBLE_FAULT)
        return None

    def _looping(self, address: int) -> bool:
        """Record a fault at `address`; return True if the guest faults in a loop.

        In a loop, the delivery of each fault causes the next fault. Such faults are at one address, each with
        a lower sp than the fault before it.
        """
        sp = self._regs.sp
        last_address, last_sp = self._last
        self._nested = self._nested + 1 if address == last_address and sp < last_sp else 0
        self._last = (address, sp)
        return self._nested >= _NESTING_LIMIT
