"""The combinations of kernels and production CPUs that several options `--image` and `--cpu` select."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress

from emulated_kernel.guests.linux.table_cache import kernel_from_file
from kprobefs.common.errors import CliError, ExitStatus


def images_and_cpus(images: Sequence[str], cpus: Sequence[str]) -> Iterator[tuple[str, str | None]]:
    """Yield (file of a kernel, CPU or None) for each combination of the kernels and CPUs.

    `images`: paths of the kernels' files. `cpus`: names of production CPUs; if empty, yield each kernel with
    None. All CPUs are models of x86-64, so a kernel for another architecture is yielded once, with None.
    Raises: CliError (CPUs are given, and no kernel is for x86-64).
    """
    architectures: dict[str, str] = {}
    for path in images if cpus else ():
        # The use of the kernel reports a file that cannot be read.
        with suppress(OSError):
            architectures[path] = kernel_from_file(path).architecture
    has_x86 = "x86_64" in architectures.values()
    if architectures and not has_x86 and all(image in architectures for image in images):
        others = ", ".join(dict.fromkeys(architectures.values()))
        why = f"only kernels for x86_64 see production CPUs, but these are for {others}; omit it"
        raise CliError(f"--cpu: {why}", ExitStatus.USAGE)
    for image in images:
        is_other = has_x86 and architectures.get(image) != "x86_64"
        for cpu in (None,) if is_other or not cpus else cpus:
            yield image, cpu
