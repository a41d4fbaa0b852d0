"""The kernel binary: its sources, its build, and the loader that takes an image apart."""

from emulated_kernel.image.image import (
    BlacklistEntry,
    BugEntry,
    ExTableEntry,
    KernelImage,
    Prot,
    Range,
    Segment,
    load_image,
)
from emulated_kernel.image.kallsyms import Kallsyms, Location, Symbol

__all__ = [
    "BlacklistEntry",
    "BugEntry",
    "ExTableEntry",
    "Kallsyms",
    "KernelImage",
    "Location",
    "Prot",
    "Range",
    "Segment",
    "Symbol",
    "load_image",
]
