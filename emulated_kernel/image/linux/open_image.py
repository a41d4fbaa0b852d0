"""Opening of the file that `--image` names, which isn't trusted: a vmlinuz, vmlinux, Image or package."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EINVAL, ENOENT
from pathlib import Path
from typing import BinaryIO

from emulated_kernel.image.linux.arm64_image import ARM64, Arm64Image, check_linked, relocated
from emulated_kernel.image.linux.bzimage import ELF_MAGIC, is_bzimage, unpack_bzimage
from emulated_kernel.image.linux.compression import MAGICS, unpack
from emulated_kernel.image.linux.packages import is_package, read_kernel
from emulated_kernel.image.linux.riscv_image import RiscvImage, is_zboot, unpack_zboot
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.image.linux.vmlinux import FILE_LIMIT, ElfReader, LinkedMemory, Vmlinux
from emulated_kernel.util.config import HOST
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.safe_read import open_regular

_BZIMAGE_LIMIT = 256 << 20
_START = 0x210
_FOREIGN = ((0x30, b"RISCV", "another RISC-V"),)
"""How to recognize kernels for other machines: offset in the header, bytes there, name of the machine.

These kernels are not supported, and are not ELF files.
"""
_IMAGES = (RiscvImage, Arm64Image)
"""Classes for kernels in the form of an Image, one for each architecture that has this form."""
_OWN_SYMBOL = "__guest_abi"
"""Name of a symbol that only images built from image/src have: that of their ABI table."""


def host_kernel() -> Path:
    """Return the path of the running kernel's file. Raises: KernelError ENOENT (no such file)."""
    release = os.uname().release
    places = (Path(f"/boot/vmlinuz-{release}"), Path(f"/lib/modules/{release}/vmlinuz"))
    for place in places:
        if place.exists():
            return place
    raise KernelError(ENOENT, f"the running kernel's file isn't here: neither {places[0]} nor {places[1]}")


def kernel_file(source: str) -> Path:
    """Return the path of a kernel's file; `source` is a path, or `host` for the running kernel.

    Raises: KernelError ENOENT (no file for `host`).
    """
    return host_kernel() if source == HOST else Path(source)


def open_vmlinux(source: str) -> LinkedMemory:
    """Unpack and open a kernel; `source` is a path, or `host` for the running kernel.

    Return a Vmlinux for an ELF file, or a FlatImage for an Image.

    Raises: KernelError ENOEXEC (the file isn't a kernel; the message says why), OSError (the file can't be
    read).
    """
    with _opened(kernel_file(source)) as file:
        start = file.read(_START)
        if start.startswith(ELF_MAGIC):
            return _elf(file)
        data = _contents(file, start)
    for image in _IMAGES:
        if image.begins(data[:_START]):
            return image(data)
    return _elf(_unpacked(data))


def _elf(file: BinaryIO) -> Vmlinux:
    vmlinux = Vmlinux(file)
    if vmlinux.architecture == ARM64:
        check_linked(vmlinux.segments[0].va)
        vmlinux.segments = relocated(vmlinux.segments)
    return vmlinux


def is_linux(path: Path) -> bool:
    """Return True if a file seems to be a distribution's kernel, and not an image built from image/src.

    An image built from image/src is an ELF file, so any other file counts as a distribution's kernel. Only
    headers and symbol names are examined. Return False for a damaged ELF file; the error is reported when the
    file is loaded.
    Raises: OSError (the file can't be read).
    """
    with open_regular(path) as file:
        if file.read(_START)[: len(ELF_MAGIC)] != ELF_MAGIC:
            return True
        try:
            return not ElfReader(file).names_symbol(_OWN_SYMBOL)
        except KernelError:
            return False


@contextmanager
def open_elf(path: Path) -> Iterator[BinaryIO]:
    """Open a kernel's ELF file, which may be packed in a vmlinuz or a package.

    Raises: KernelError ENOEXEC (the file contains no kernel), OSError (the file can't be read).
    """
    with _opened(path) as file:
        start = file.read(_START)
        file.seek(0)
        yield file if start.startswith(ELF_MAGIC) else _unpacked(_contents(file, start))


def is_image(start: bytes) -> bool:
    """Return True if a file that begins with `start` is an Image for arm64 or riscv64."""
    return any(image.begins(start) for image in _IMAGES)


def _contents(file: BinaryIO, start: bytes) -> bytes:
    """Return the kernel (a vmlinux, vmlinuz or Image) in a file that is no ELF file and begins with `start`.

    Raises: KernelError ENOEXEC (the file contains no kernel).
    """
    if is_package(start):
        data = _compressed_image(file, start) or read_kernel(file)
    elif is_bzimage(start) or is_image(start) or is_zboot(start):
        data = _bounded(file)
    else:
        raise unusable(_foreign(start))
    return unpack_zboot(data) if is_zboot(data[:_START]) else data


def _compressed_image(file: BinaryIO, start: bytes) -> bytes | None:
    """Return the Image that a compressed file contains; None if the file contains something else."""
    if not start.startswith(MAGICS):
        return None
    file.seek(0)
    pieces = unpack(file, FILE_LIMIT)
    first = next(pieces, b"")
    return b"".join((first, *pieces)) if is_image(first) else None


def _unpacked(data: bytes) -> BinaryIO:
    """Return a file object for a vmlinux in memory, or for the vmlinux inside a vmlinuz in memory.

    Raises: KernelError ENOEXEC (`data` is neither, for example a kernel for another machine).
    """
    import io

    start = data[:_START]
    if is_bzimage(start):
        return io.BytesIO(unpack_bzimage(data))
    if not start.startswith(ELF_MAGIC):
        raise unusable(_foreign(start))
    return io.BytesIO(data)


def _opened(path: Path) -> BinaryIO:
    try:
        return open_regular(path)
    except OSError as error:
        if error.errno == EINVAL:
            raise unusable(str(error.strerror)) from None
        raise


def _bounded(file: BinaryIO) -> bytes:
    """Return the contents of a vmlinuz or Image. Raises: KernelError ENOEXEC (the file is too large)."""
    if file.seek(0, os.SEEK_END) > _BZIMAGE_LIMIT:
        raise unusable(f"a vmlinuz of more than {_BZIMAGE_LIMIT >> 20} MiB")
    file.seek(0)
    return file.read(_BZIMAGE_LIMIT)


def _foreign_machine(start: bytes) -> str | None:
    """Return the name of the unsupported machine whose kernel begins with `start`, from _FOREIGN.

    Return None if no item of _FOREIGN matches.
    """
    return next((name for at, magic, name in _FOREIGN if start.startswith(magic, at)), None)


def _foreign(start: bytes) -> str:
    if not start:
        return "an empty file"
    machine = _foreign_machine(start)
    if machine is not None:
        return f"a kernel for {machine}; use one for x86_64, arm64 or riscv64"
    if start[:2] == b"MZ":
        return "an EFI program, but no Linux for x86_64, arm64 or riscv64"
    return (
        "neither a vmlinuz, vmlinux or Image for x86_64, arm64 or riscv64, nor a package (.deb, .rpm, "
        ".pkg.tar.zst)"
    )
