"""Table cache: a file with the decoded tables of a distribution's kernel, which speeds up the next start."""

from __future__ import annotations

import logging

from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.image.linux.cached_tables import CachedKernelTables, cached_parts
from emulated_kernel.image.linux.linux_kernel import LinuxKernel, open_kernel
from emulated_kernel.image.linux.open_image import kernel_file

log = logging.getLogger("kprobefs.linux")


def kernel_from_file(source: str) -> LinuxKernel:
    """Return the kernel in the file `source`, with its text as it was linked.

    `source`: the path of a kernel's file, or `host` for the running kernel. If the tables can't be kept in
    the cache, log the error. Raises: KernelError ENOEXEC (no usable kernel), ENOENT (the host's kernel file
    is not found), OSError (the kernel's file can't be read).
    """
    path = kernel_file(source)
    place = snapshot.tables_place(path)
    found = snapshot.load_as(place, lambda kept: CachedKernelTables(kept.parts), with_parts=True)
    if found is not None:
        return found
    kernel = open_kernel(str(path))
    try:
        snapshot.save_tables(place, kernel, str(path), cached_parts(kernel))
    except OSError as error:
        log.warning("%s: can't keep the kernel's tables there: %s", place.parent, error.strerror)
    return kernel
