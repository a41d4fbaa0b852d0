"""An architecture as fetch arguments see it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from emulated_kernel.arch.base import Arch

THREAD_SIZE = 16 << 10
TASK_SIZE_64 = (1 << 47) - 4096
"""The first address behind user space on x86_64. Mirrors: arch/x86/include/asm/page_64_types.h."""


class TraceView:
    """Implements trace.ports.TraceArch."""

    def __init__(self, arch: Arch) -> None:
        registers = arch.registers
        self.registers: Mapping[str, str] = registers.names
        self.argument_registers: Sequence[str] = registers.arguments
        self.stack_arguments = registers.link is None
        self.return_register = registers.return_value
        self.stack_pointer = registers.sp
        self.word_size = arch.word_size
        self.thread_size = THREAD_SIZE
        self.task_size = TASK_SIZE_64
