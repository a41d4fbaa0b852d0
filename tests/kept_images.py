"""Prebuilt images and their tables of events, read once in a process: thousands of tests boot a kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import TypeVar

from emulated_kernel.image import builtin_image, prototypes, trace_events

_T = TypeVar("_T")
_load = builtin_image.load_image
_PREBUILT: dict[str, builtin_image.KernelImage] = {}
"""Architecture -> prebuilt image. Tests can share the images, because nothing changes them."""


def load_image(path: Path | str | None = None, arch: str = "x86_64") -> builtin_image.KernelImage:
    """Return a kernel image, from a cache if it is prebuilt: reading an image takes a third of a boot.

    The arguments are those of builtin_image.load_image().
    """
    if path is not None or arch not in _PREBUILT:
        loaded = _load(path, arch)
        return loaded if path is not None else _PREBUILT.setdefault(arch, loaded)
    return _PREBUILT[arch]


def _once(
    find: Callable[[builtin_image.KernelImage], Iterable[_T]],
) -> Callable[[builtin_image.KernelImage], Iterable[_T]]:
    """Return `find` with a cache for prebuilt images: reading tables of events takes a fifth of a boot."""
    found: dict[str, tuple[_T, ...]] = {}

    def find_once(of: builtin_image.KernelImage) -> Iterable[_T]:
        prebuilt = _PREBUILT.get(of.arch)
        # Each boot has a new image object, which shares its segments with the prebuilt image.
        if prebuilt is None or of.segments is not prebuilt.segments:
            return find(of)
        if of.arch not in found:
            found[of.arch] = tuple(find(of))
        return found[of.arch]

    return find_once


def keep_images() -> None:
    """Replace the functions that read images; call this before other modules import them by name."""
    builtin_image.load_image = load_image
    prototypes.load_argument_counts = cache(prototypes.load_argument_counts)
    for table in ("event_definitions", "syscall_definitions"):
        setattr(trace_events, table, _once(getattr(trace_events, table)))
