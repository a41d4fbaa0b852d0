"""`kprobefs debug-info`: write a kernel's symbols and types to a file for drgn, gdb and crash."""

from __future__ import annotations

from collections.abc import Callable

from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.image.linux.debug_file import builtin_debug_file, linux_debug_file
from emulated_kernel.image.linux.linux_kernel import open_kernel
from kprobefs.common.errors import explained
from kprobefs.common.output_file import OutputFile


def run(output: str | None, *, arch: str | None, image: str | None) -> None:
    """Write the file `output`, or vmlinux-RELEASE.debug in the current directory, and print its path.

    `image`: a distribution's kernel; None: kprobefs's own kernel for `arch`, or for x86_64 if `arch` is None.
    Raises: CliError (no such kernel, it has no BTF, or the file cannot be written), KernelError ENOENT (no
    kernel for `arch`).
    """
    if image is None:
        own = load_image(None, arch or "x86_64")
        _write(output, f"{own.version.split()[2]}-{own.arch}", lambda: builtin_debug_file(own))
        return
    with explained(image):
        kernel = open_kernel(image)
        _write(output, kernel.release, lambda: linux_debug_file(kernel))


def _write(output: str | None, release: str, data: Callable[[], bytes]) -> None:
    path = output or f"vmlinux-{release}.debug"
    with OutputFile(path) as file:
        file.write(data())
    print(path)
