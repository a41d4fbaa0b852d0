"""Boot time of the built-in kernel, until its first system call has returned; the target is 0.2 s.

One process that has already imported everything boots the kernels of all architectures. The figures are thus
the start-up time of a daemon without the interpreter's own start.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from common import Distribution, arguments, report, steady

from emulated_kernel.image.builtin_image import PREBUILT
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import ARCHITECTURES, MachineConfig

TARGET = 0.2


def boot(arch: str) -> float:
    """Boot a kernel, and return the seconds until the first system call of a task has returned."""
    start = time.perf_counter()
    with Kernel(MachineConfig(arch=arch)) as kernel:
        with kernel.lock:
            kernel.guest.syscalls.call(kernel.guest.processes.init, "getpid")
        return time.perf_counter() - start


def measure(archs: Sequence[str], runs: int) -> list[Distribution]:
    """Measure the boots of all architectures in turns.

    A slow period of the host thus affects all of them.
    """
    samples = [[boot(arch) for arch in archs] for _ in range(runs)]
    return [
        Distribution(f"boot to first system call, {arch}", "s", tuple(run[index] for run in samples), TARGET)
        for index, arch in enumerate(archs)
    ]


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    present = [arch for arch in ARCHITECTURES if (PREBUILT / arch / "vmlinux").exists()]
    for arch in present:
        boot(arch)
    report(steady(options, measure, present, options.runs), options)


if __name__ == "__main__":
    main()
