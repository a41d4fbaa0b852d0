"""`kprobefs debug-info`: write a kernel's symbols and types to a file for drgn, gdb and crash."""

from __future__ import annotations

from pathlib import Path

from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.image.linux.debug_file import builtin_debug_file, linux_debug_file
from emulated_kernel.image.linux.linux_kernel import open_kernel
from kprobefs.common.errors import CliError, explained


def run(output: str | None, *, arch: str | None, image: str | None) -> None:
    """Write the file `output`, or vmlinux-RELEASE.debug in the current directory, and print its path.

    `arch`: architecture of a kernel of kprobefs's own. `image`: a distribution's kernel instead.
    Raises: CliError (no such kernel, or it has no BTF), KernelError ENOENT, OSError.
    """
    if image is None:
        own = load_image(None, arch or "x86_64")
        release = f"{own.version.split()[2]}-{own.arch}"
        data = builtin_debug_file(own)
    else:
        with explained(image):
            kernel = open_kernel(image)
            release = kernel.release
            data = linux_debug_file(kernel)
    path = Path(output or f"vmlinux-{release}.debug")
    try:
        path.write_bytes(data)
    except OSError as error:
        raise CliError(f"{path}: {error.strerror}; name another file with -o") from error
    print(path)
