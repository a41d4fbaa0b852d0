"""What `--image` names: a vmlinuz, a vmlinux, a Debian package, or `host`; opened without trusting it."""

from __future__ import annotations

import os
from errno import EINVAL, ENOENT
from pathlib import Path
from typing import BinaryIO

from emulated_kernel.config import HOST
from emulated_kernel.errors import KernelError
from emulated_kernel.image.linux import deb
from emulated_kernel.image.linux.bzimage import ELF_MAGIC, is_bzimage, unpack_bzimage
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.image.linux.vmlinux import Vmlinux
from emulated_kernel.regular import open_regular

_BZIMAGE_LIMIT = 256 << 20
_START = 0x210


def host_kernel() -> Path:
    """The file of the kernel that runs here. Raises: KernelError ENOENT."""
    release = os.uname().release
    places = (Path(f"/boot/vmlinuz-{release}"), Path(f"/lib/modules/{release}/vmlinuz"))
    for place in places:
        if place.exists():
            return place
    raise KernelError(ENOENT, f"the running kernel's file isn't here: neither {places[0]} nor {places[1]}")


def open_vmlinux(source: str) -> Vmlinux:
    """The unpacked kernel of a file, or of the host.

    Raises: KernelError ENOEXEC for what isn't one, with what is wrong; OSError where it can't be read.
    """
    path = host_kernel() if source == HOST else Path(source)
    with _opened(path) as file:
        start = file.read(_START)
        file.seek(0)
        if start.startswith(ELF_MAGIC):
            return Vmlinux(file)
        if start.startswith(deb.AR_MAGIC):
            return _of_kernel(deb.read_kernel(file))
        if is_bzimage(start):
            return _of_kernel(_bounded(file))
    raise unusable(_foreign(start))


def _of_kernel(data: bytes) -> Vmlinux:
    """Of a whole vmlinuz or vmlinux in memory."""
    import io

    if is_bzimage(data[:_START]):
        data = unpack_bzimage(data)
    return Vmlinux(io.BytesIO(data))


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        if error.errno == EINVAL:
            raise unusable(str(error.strerror)) from None
        raise


def _bounded(file: BinaryIO) -> bytes:
    """All of it. Raises: KernelError ENOEXEC for more than a vmlinuz has, before memory is taken for that."""
    if file.seek(0, os.SEEK_END) > _BZIMAGE_LIMIT:
        raise unusable(f"a vmlinuz of more than {_BZIMAGE_LIMIT >> 20} MiB")
    file.seek(0)
    return file.read(_BZIMAGE_LIMIT)


def _foreign(start: bytes) -> str:
    if not start:
        return "an empty file"
    if start[0x38:0x3C] == b"ARMd":
        return "a kernel for arm64"
    if start[:2] == b"MZ":
        return "an EFI program, but no Linux for x86"
    return "neither a vmlinuz, a vmlinux for x86_64, nor a Debian package"
