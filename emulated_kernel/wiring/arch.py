"""The architectures there are, and one of them as fetch arguments see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from errno import ENOENT

from emulated_kernel.arch.base import Arch
from emulated_kernel.arch.riscv.arch import RISCV64, RISCV64I
from emulated_kernel.arch.x86.arch import I386, X86_64
from emulated_kernel.errors import KernelError

THREAD_SIZE = 16 << 10
_ARCHS: tuple[type[Arch], ...] = (X86_64, I386, RISCV64, RISCV64I)


def arch_named(name: str) -> Arch:
    """The hooks of an architecture. Raises: KernelError ENOENT where there are none."""
    for arch in _ARCHS:
        if arch.name == name:
            return arch()
    raise KernelError(ENOENT, f"unknown architecture {name}")


class TraceView:
    """Implements trace.ports.TraceArch."""

    def __init__(self, arch: Arch) -> None:
        registers = arch.registers
        self.registers: Mapping[str, str] = registers.names
        self.argument_registers: Sequence[str] = registers.arguments
        self.stack_arguments = registers.link is None
        self.return_register = registers.return_value
        self.stack_pointer = registers.sp
        self.general_registers = arch.general_registers
        self.seen_ip = arch.seen_ip
        kept = () if arch.live_at_return is None else (*arch.live_at_return.registers, registers.sp, "ip")
        self.kept_at_return = frozenset(kept)
        self.word_size = arch.word_size
        self.thread_size = THREAD_SIZE
        self.task_size = arch.task_size
