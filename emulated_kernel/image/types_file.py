"""The types of kprobefs's own kernels: BTF in a file next to each image."""

from __future__ import annotations

from pathlib import Path

from emulated_kernel.util.safe_read import read_regular

TYPE_CHECKING = False
if TYPE_CHECKING:
    from emulated_kernel.image.linux.btf import Btf

FILE_NAME = "types.btf"
_LIMIT = 16 << 20
"""Maximum size in bytes of a file with an image's types."""


def load_types(image: Path) -> Btf | None:
    """Return the types of an image, or None if no file with types is next to it.

    Raises: KernelError ENOEXEC (damaged data).
    """
    try:
        data = read_regular(image.with_name(FILE_NAME), _LIMIT)
    except OSError:
        return None
    # A mount without arguments by name does not need the parser.
    from emulated_kernel.image.linux.btf import Btf

    return Btf(data)
