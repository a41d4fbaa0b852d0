"""Prebuilt images, their tables of events and their branches, which are read only once, because thousands of
tests boot a kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache, cached_property
from hashlib import sha256
from pathlib import Path
from typing import TypeVar

from emulated_kernel.arch.analysis.xrefs import CodeXrefs, PossibleReferences, Reference, XrefIndex
from emulated_kernel.image import builtin_image, prototypes, trace_events

_T = TypeVar("_T")
_load = builtin_image.load_image
_PREBUILT: dict[str, builtin_image.KernelImage] = {}
"""Architecture -> prebuilt image. Tests can share the images, because nothing changes them."""
_SMALL_TEXT = 1 << 20
"""Maximum size in bytes of text whose branches are found at once; a distribution's kernel has more."""
_MOST_TEXTS = 20
"""Number of texts whose branches are kept."""
_BRANCHES: dict[tuple[object, int, bytes], XrefIndex] = {}
"""(function that finds branches, address of text, its digest) -> the branches. Nothing changes them."""


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


class _KeptXrefs(CodeXrefs):
    """References whose branches within a text are found only once in a process.

    The search takes several times as long as a boot of a small kernel, and a second in a distribution's
    kernel. tests/arch/test_references.py tests CodeXrefs itself.
    """

    @cached_property
    def _own_branches(self) -> XrefIndex:
        (start, end), *_ = self._image.text_ranges
        code = bytes(self._image.read(start, end - start))
        find = self._possible_branches
        key = getattr(find, "__func__", find), start, sha256(code).digest()
        if key not in _BRANCHES and len(_BRANCHES) == _MOST_TEXTS:
            _BRANCHES.clear()
        if len(code) <= _SMALL_TEXT:
            if key not in _BRANCHES:
                _BRANCHES[key] = XrefIndex(_found(find, start, code), distance="i")
            return _BRANCHES[key]
        own = super()._own_branches
        kept = _BRANCHES.setdefault(key, own)
        # The kept index then refers to this kernel, so that an earlier kernel with the same text is freed.
        kept._search = own._search
        return kept


def _found(find: PossibleReferences, start: int, code: bytes) -> Callable[[object], list[Reference]]:
    """Return a function that returns the branches within `code`, and does not keep the kernel of `find`."""
    inside = range(start, start + len(code))
    branches = [way for way in find(start, code, None) if way[0] in inside]
    return lambda _window: branches


def keep_images() -> None:
    """Replace the functions that read images; call this before other modules import them by name."""
    builtin_image.load_image = load_image
    prototypes.load_argument_counts = cache(prototypes.load_argument_counts)
    for table in ("event_definitions", "syscall_definitions"):
        setattr(trace_events, table, _once(getattr(trace_events, table)))
    # probe_checks is imported only here, because its imports use the functions replaced above.
    from emulated_kernel.arch import probe_checks

    vars(probe_checks)["CodeXrefs"] = _KeptXrefs
