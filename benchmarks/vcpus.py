"""Several CPUs: what a switch costs, and how long a kernel takes from its start to its first system call."""

from __future__ import annotations

from statistics import median
from time import perf_counter, thread_time

from emulated_kernel.config import MachineConfig
from emulated_kernel.kernel import Kernel

ARCHITECTURES = ("x86_64", "i386", "riscv64", "riscv64i")
SWITCHES = 10_000
ROUNDS = 7


def switch_us(kernel: Kernel) -> float:
    """Microseconds of a switch from one CPU to the other, with all that follows it."""
    machine, costs = kernel.machine, []
    for _ in range(ROUNDS):
        before = thread_time()
        for _ in range(SWITCHES // 2):
            machine.switch_to(1)
            machine.switch_to(0)
        costs.append((thread_time() - before) / SWITCHES * 1e6)
    return median(costs)


def boot_seconds(arch: str, cpus: int) -> float:
    """Seconds until the first system call has ended."""
    costs = []
    for _ in range(ROUNDS):
        before = perf_counter()
        with Kernel(MachineConfig(arch=arch, cpus=cpus)) as kernel:
            kernel.guest.syscalls.call(kernel.guest.mirror.init, "getpid")
            costs.append(perf_counter() - before)
    return median(costs)


def main() -> None:
    """Print a line an architecture."""
    for arch in ARCHITECTURES:
        with Kernel(MachineConfig(arch=arch, cpus=2)) as kernel:
            switch = switch_us(kernel)
        boots = ", ".join(f"{cpus} CPUs {boot_seconds(arch, cpus):.3f} s" for cpus in (1, 4))
        print(f"{arch:9} switch {switch:.2f} us; boot to the first system call: {boots}")


if __name__ == "__main__":
    main()
