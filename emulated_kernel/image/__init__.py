"""The kernel binary: its sources, its build, and the loader that takes an image apart.

What is loaded doesn't change, but for modules.LiveImage, which modules come to and leave under the control
lock; nothing here but linux takes a lock. build.py is a command, and nobody imports it at run time.
"""

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
