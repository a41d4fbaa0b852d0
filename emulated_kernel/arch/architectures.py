"""Look-up of the supported architectures by name. An architecture's modules are imported when needed."""

from __future__ import annotations

from errno import ENOENT

from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.util.config import ELF_MACHINES, ElfMachine
from emulated_kernel.util.errors import KernelError


def _x86() -> tuple[type[Arch], ...]:
    from emulated_kernel.arch.x86.arch import I386, X86_64

    return X86_64, I386


def _riscv() -> tuple[type[Arch], ...]:
    from emulated_kernel.arch.riscv.arch import RISCV64, RISCV64I

    return RISCV64, RISCV64I


def _arm64() -> tuple[type[Arch], ...]:
    from emulated_kernel.arch.arm64.arch import Arm64

    return (Arm64,)


_FAMILIES = {
    ElfMachine.X86_64: _x86,
    ElfMachine.I386: _x86,
    ElfMachine.AARCH64: _arm64,
    ElfMachine.RISCV: _riscv,
}


def linux_arch(name: str, *, has_smap: bool = False) -> Arch:
    """Return the hooks for a distribution's kernel on the architecture `name`.

    `has_smap`: True if the architecture is x86_64 and SMAP is on in its CPU.
    """
    if has_smap:
        from emulated_kernel.arch.x86.arch import SmapX86_64

        return SmapX86_64()
    if ELF_MACHINES[name] is not ElfMachine.RISCV:
        return arch_named(name)
    from emulated_kernel.arch.riscv.arch import LinuxRISCV64

    return LinuxRISCV64()


def arch_named(name: str) -> Arch:
    """Return the hooks of the architecture `name`. Raises: KernelError ENOENT (unknown architecture)."""
    if name not in ELF_MACHINES:
        raise KernelError(ENOENT, f"unknown architecture {name}")
    return next(arch for arch in _FAMILIES[ELF_MACHINES[name]]() if arch.name == name)()
