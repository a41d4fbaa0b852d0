"""ReplacedCalls: reads arguments and returns results of functions whose work the host does."""

from __future__ import annotations

from operator import attrgetter
from typing import Any

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.machine.memory.guest_memory import GuestMemory


class ReplacedCalls:
    """Access to arguments and result of a kernel function, at the function's first instruction."""

    def __init__(self, arch: Arch, memory: GuestMemory) -> None:
        self._memory = memory
        self._mask = arch.mask
        registers = arch.registers
        self.argument_names = registers.arguments
        """Names of the registers with a function's arguments, from the first argument on."""
        self.arguments = attrgetter(*registers.arguments[:3])
        """Function that takes the registers, and returns the first three arguments in them."""
        self.result = registers.return_value
        """Name of the register with a function's result."""
        self._link = registers.link

    def end(self, regs: Any, result: int) -> None:
        """Make the kernel's function return `result` at once, without executing its body.

        `regs`: the registers at the function's first instruction. Raises: MemoryFault (the stack is not
        mapped).
        """
        if self._link is None:
            regs.ip = self._memory.read_word(regs.sp)
            regs.sp += self._memory.word_size
        else:
            regs.ip = getattr(regs, self._link)
        setattr(regs, self.result, result & self._mask)
