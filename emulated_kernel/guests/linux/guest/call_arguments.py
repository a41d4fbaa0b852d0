"""CallArguments: finds the function that a call names, and copies string arguments to guest memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from errno import E2BIG, EINVAL, ENOENT, ENOMEM

from emulated_kernel.image.linux.linux_kernel import LinuxKernel
from emulated_kernel.machine.memory.guest_memory import GuestMemory
from emulated_kernel.util.errors import KernelError

REGISTERS = ("di", "si", "dx", "cx", "r8", "r9")
_MASK = (1 << 64) - 1


class CallArguments:
    """Converts the arguments of a call of a kernel function to register values.

    String arguments are copied to a buffer in guest memory: `size` bytes at the address `place`.
    """

    def __init__(self, kernel: LinuxKernel, memory: GuestMemory, place: int, size: int) -> None:
        self._kernel = kernel
        self._memory = memory
        self._place = place
        self._size = size

    def placed(self, function: str, arguments: Sequence[int | str]) -> tuple[int, list[int]]:
        """Copy string arguments; return the function's address and the values of the argument registers.

        Raises: KernelError ENOENT (no such symbol), EINVAL (not a function, or fewer arguments than the
        function takes), E2BIG (too many arguments), ENOMEM (the strings are too long).
        """
        found = self._kernel.kallsyms.by_name(function)
        if not found:
            raise KernelError(ENOENT, f"no symbol named {function}")
        if not found[0].is_text:
            raise KernelError(EINVAL, f"{function} is not a function")
        if len(arguments) > len(REGISTERS):
            raise KernelError(E2BIG, f"at most {len(REGISTERS)} arguments")
        needed = 0
        with suppress(KernelError):
            needed = min(self._kernel.btf.parameters(function), len(REGISTERS))
        if len(arguments) < needed:
            noun = "argument" if needed == 1 else "arguments"
            raise KernelError(EINVAL, f"{function} takes {needed} {noun}, not {len(arguments)}")
        return found[0].address, self._values(arguments)

    def _values(self, arguments: Sequence[int | str]) -> list[int]:
        values = []
        at = 0
        for argument in arguments:
            if isinstance(argument, int):
                values.append(argument & _MASK)
                continue
            data = argument.encode("utf-8", "surrogateescape") + b"\0"
            if at + len(data) > self._size:
                raise KernelError(ENOMEM, "the strings are too long")
            self._memory.write(self._place + at, data)
            values.append(self._place + at)
            at += -(-len(data) // 8) * 8
        return values
