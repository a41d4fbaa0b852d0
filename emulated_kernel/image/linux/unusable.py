"""unusable(): how everything in this package says that a file is no kernel that it can read."""

from __future__ import annotations

from errno import ENOEXEC

from emulated_kernel.errors import KernelError


def unusable(message: str) -> KernelError:
    """The error to raise: ENOEXEC, with what is wrong."""
    return KernelError(ENOEXEC, f"not a usable kernel: {message}")
