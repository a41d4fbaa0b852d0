"""Packages with kernels and modules: Debian's and Ubuntu's .deb, Fedora's .rpm, and Arch's .pkg.tar.zst."""

from __future__ import annotations

from os import SEEK_END
from typing import BinaryIO

from emulated_kernel.image.linux.compression import MAGICS
from emulated_kernel.image.linux.deb import AR_MAGIC, PackageTar, deb_depends, deb_tar
from emulated_kernel.image.linux.rpm import RPM_MAGIC, RpmPackage
from emulated_kernel.image.linux.unusable import unusable
from emulated_kernel.util.errors import KernelError
from emulated_kernel.util.lazy_pattern import lazy_pattern

MAGIC_SIZE = max(len(magic) for magic in (AR_MAGIC, RPM_MAGIC, *MAGICS))
_KERNEL = lazy_pattern(r"(\.?/)?(boot/vmlinu[xz]-[^/]+|(usr/)?lib/modules/[^/]+/vmlinuz)")
_MODULE = lazy_pattern(r"(\.?/)?(usr/)?lib/modules/(?P<release>[^/]+)/.+\.ko(\.\w+)?")
_PART_OF_KERNEL = lazy_pattern(r"linux-(binary|image|modules)-")


def is_package(start: bytes) -> bool:
    """Return True if a file that begins with `start` seems to be a package, or a compressed tar archive."""
    return start.startswith((AR_MAGIC, RPM_MAGIC, *MAGICS))


def open_package(package: BinaryIO) -> PackageTar:
    """Return the archive of a package's files. Raises: KernelError ENOEXEC (the package is damaged)."""
    package.seek(0)
    start = package.read(MAGIC_SIZE)
    if start.startswith(AR_MAGIC):
        return deb_tar(package)
    if start.startswith(RPM_MAGIC):
        return RpmPackage(package)
    return PackageTar(package, 0, package.seek(0, SEEK_END))


def read_kernel(package: BinaryIO) -> bytes:
    """Return the contents of a package's vmlinuz or vmlinux file.

    Raises: KernelError ENOEXEC (the package contains no kernel, or is damaged).
    """
    archive = open_package(package)
    release = ""
    for name, start, size, _ in archive.files():
        if _KERNEL.fullmatch(name):
            return archive.read_file(start, size)
        if found := _MODULE.fullmatch(name):
            release = found["release"]
    if release:
        why = f"a package of modules; give the kernel {release} itself, which finds this package next to it"
        raise unusable(why)
    raise unusable(f"a package without a kernel in boot/ or lib/modules/{_instead(package)}")


def _instead(package: BinaryIO) -> str:
    """Return the end of the error message about a package without a kernel: which packages to use instead.

    These are the kernel packages on which a Debian package depends. Return "" if there are none.
    """
    package.seek(0)
    if package.read(len(AR_MAGIC)) != AR_MAGIC:
        return ""
    try:
        found = [name for name in deb_depends(package) if _PART_OF_KERNEL.match(name)]
    except KernelError:
        return ""
    return f"; it depends on {' and '.join(found)}" if found else ""
