"""The architectures there are."""

from __future__ import annotations

from errno import ENOENT

from emulated_kernel.arch.base import Arch
from emulated_kernel.arch.riscv.arch import RISCV64, RISCV64I
from emulated_kernel.arch.x86.arch import I386, X86_64
from emulated_kernel.errors import KernelError

_ARCHS: tuple[type[Arch], ...] = (X86_64, I386, RISCV64, RISCV64I)


def arch_named(name: str) -> Arch:
    """The hooks of an architecture. Raises: KernelError ENOENT where there are none."""
    for arch in _ARCHS:
        if arch.name == name:
            return arch()
    raise KernelError(ENOENT, f"unknown architecture {name}")
