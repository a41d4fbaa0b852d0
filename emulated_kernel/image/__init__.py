"""The kernel binary: its sources, its build, and the loader that takes an image apart."""

from emulated_kernel.image.image import KernelImage, Segment, load_image
from emulated_kernel.image.kallsyms import Kallsyms, Location, Symbol
from emulated_kernel.image.tables import BlacklistEntry, BugEntry, ExTableEntry, Range

__all__ = [
    "BlacklistEntry",
    "BugEntry",
    "ExTableEntry",
    "Kallsyms",
    "KernelImage",
    "Location",
    "Range",
    "Segment",
    "Symbol",
    "load_image",
]
