"""`kprobefs images`: lists the distributions' kernels in the boot cache, and further ones on this host."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator

from emulated_kernel.guests.linux.boot import snapshot
from emulated_kernel.util.fast_dataclass import asdict, dataclass
from kprobefs.common.errors import escape_for_terminal
from kprobefs.common.kernel_packages import at_hand

_UNITS = ((86400, "d"), (3600, "h"), (60, "min"))
"""Units in which ages are printed, the largest first: (seconds in the unit, name of the unit)."""


@dataclass(frozen=True)
class Image:
    """A kernel in the list that `kprobefs images` prints.

    An attribute is None if its value is unknown, or if the kernel has not been booted yet.
    """

    release: str | None
    architecture: str | None
    source: str | None
    """Path of the file that contains the kernel: an image or a package."""
    size: int
    """Size in bytes of the snapshot of the booted kernel; if there is none, size of the file `source`."""
    age_seconds: float | None
    """Seconds since the snapshot was made, or None if there is no snapshot."""
    boot_seconds: float | None
    """CPU time in seconds that the boot took."""
    kept: str | None
    """Text about what the snapshot contains: "tables", "dump", or "boot" and how it differs from the default.

    "tables": no boot, but facts for `kprobefs explain`. "dump": a vmcore. "boot, seed 7": a boot with this
    seed. None if there is no snapshot or it is damaged.
    """


def images() -> Iterator[Image]:
    """Yield the kernels in the boot cache, the most recently used first, and then other kernels on this host.

    The other kernels are those of kernel_packages.at_hand() that are not in the cache.
    """
    now = time.time()
    known = set()
    for kernel in snapshot.cached():
        known.add(kernel.source)
        age = max(0.0, now - kernel.made)
        facts = kernel.release, kernel.architecture, kernel.source, kernel.size
        yield Image(*facts, age, kernel.boot_seconds, kernel.kept or None)
    for path, release, architecture in at_hand():
        if str(path) not in known:
            yield Image(release, architecture, str(path), path.stat().st_size, None, None, None)


def print_images(*, as_json: bool) -> None:
    """Print the kernels of images() as a table or as a JSON array."""
    if as_json:
        import json

        print(json.dumps([asdict(image) for image in images()], indent=2))
        return
    found = list(images())
    rows = [
        (
            image.release or "not usable",
            image.architecture or "?",
            image.kept or "-",
            f"{image.size >> 20} MiB",
            "-" if image.age_seconds is None else _age(image.age_seconds),
            "-" if image.boot_seconds is None else f"{image.boot_seconds:.1f} s",
            _shown(image.source or "?"),
        )
        for image in found
    ]
    size = sum(image.size for image in found if image.age_seconds is not None)
    place = escape_for_terminal(str(snapshot.directory()))
    used = f"{size >> 20} of at most {snapshot.LIMIT >> 20} MiB are used"
    print(f"kprobefs: images: boots and tables are kept in {place}; {used}", file=sys.stderr)
    if not rows:
        remedy = "fetch one with kprobefs images fetch debian:bookworm/cloud"
        print(f"kprobefs: images: no kernels; {remedy}", file=sys.stderr)
        return
    table = [("RELEASE", "ARCH", "KEPT", "SIZE", "AGE", "BOOT", "FILE"), *rows]
    *widths, longest = [max(map(len, column)) for column in zip(*table, strict=True)]
    width = sum(widths) + 2 * len(widths) + longest
    # In a pipe, a kernel has one line. On a narrow terminal, its file is below its other properties.
    is_narrow = sys.stdout.isatty() and width > shutil.get_terminal_size().columns
    for *words, source in table:
        begin = "  ".join(word.ljust(width) for word, width in zip(words, widths, strict=True))
        line = f"{begin.rstrip()}\n    {source}" if is_narrow else f"{begin}  {source}"
        print("\n".join(map(escape_for_terminal, line.split("\n"))))


def _shown(path: str) -> str:
    """Return the path of a file as users can copy it: on a terminal, with ~ for the home directory.

    A path in a pipe is for programs, which do not replace ~. A shell does not replace ~ within quotes, so a
    path that needs quotes keeps the home directory.
    """
    home = os.path.expanduser("~").rstrip("/")
    is_plain = shlex.quote(path) == path
    if home and is_plain and sys.stdout.isatty() and path.startswith(f"{home}/"):
        return f"~{path.removeprefix(home)}"
    return path


def _age(seconds: float) -> str:
    for unit, name in _UNITS:
        if seconds >= unit:
            return f"{int(seconds // unit)} {name}"
    return f"{int(seconds)} s"
