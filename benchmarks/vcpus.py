"""CPU time of a switch of the machine from one CPU to another, for each architecture; target: 2 us.

The guest executes no instructions between the switches.
"""

from __future__ import annotations

from time import thread_time

from common import Distribution, arguments, report, steady

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import ARCHITECTURES, MachineConfig

TARGET = 2.0


def switch_us(kernel: Kernel, switches: int) -> float:
    """Switch `switches` times, and return the microseconds of one switch."""
    machine = kernel.machine
    before = thread_time()
    for _ in range(switches // 2):
        machine.switch_to(1)
        machine.switch_to(0)
    return (thread_time() - before) / switches * 1e6


def measure(kernel: Kernel, switches: int, rounds: int) -> list[Distribution]:
    """Measure the switches of a kernel."""
    samples = tuple(switch_us(kernel, switches) for _ in range(rounds))
    return [Distribution(f"switch of CPUs, {kernel.machine.config.arch}", "us", samples, TARGET)]


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--switches", type=int, default=10_000)
    options = parser.parse_args()
    figures: list[Distribution] = []
    for arch in ARCHITECTURES:
        with Kernel(MachineConfig(arch=arch, cpus=2)) as kernel:
            figures += steady(options, measure, kernel, options.switches, options.rounds)
    report(figures, options)


if __name__ == "__main__":
    main()
