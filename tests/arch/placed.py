"""Handler code and the code after it, as the engine places both in guest memory."""

from __future__ import annotations

from dataclasses import replace

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.ir import HandlerCode


def going_on(arch: Arch, handler: HandlerCode, buffer: int, target: int) -> HandlerCode:
    """Return `handler`, which lies at `buffer`, with a jump to `target` at its end."""
    return replace(handler, code=handler.code + arch.relative_jump(buffer + len(handler.code), target))


def detouring(arch: Arch, handler: HandlerCode, buffer: int, region: Region) -> HandlerCode:
    """Return `handler`, which lies at `buffer`, with the relocated instructions of `region` at its end."""
    return replace(handler, code=handler.code + arch.relocated(region, buffer + len(handler.code)))
