"""Handlers with what stands behind them in guest memory, as the engine puts them together."""

from __future__ import annotations

from dataclasses import replace

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.arch_hooks import Arch
from emulated_kernel.arch.program.ir import HandlerCode


def going_on(arch: Arch, handler: HandlerCode, buffer: int, target: int) -> HandlerCode:
    """A handler at `buffer` that goes on at `target`."""
    return replace(handler, code=handler.code + arch.relative_jump(buffer + len(handler.code), target))


def detouring(arch: Arch, handler: HandlerCode, buffer: int, region: Region) -> HandlerCode:
    """A handler at `buffer` with the instructions of a region behind it."""
    return replace(handler, code=handler.code + arch.relocated(region, buffer + len(handler.code)))
