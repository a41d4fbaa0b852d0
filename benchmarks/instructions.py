"""Guest instructions per second, compared with bare Unicorn. The target is at least 0.9 of Unicorn's speed.

Bare Unicorn is a Uc of Unicorn's own Python binding. It has a copy of the machine's memory with its page
tables, but no hooks, traps or budget. Both sides run the same functions on the same data, in turns. A hook in
the bare Uc counts the instructions.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from common import Distribution, arguments, report, steady
from unicorn import UC_ARCH_X86, UC_HOOK_CODE, UC_MODE_64
from unicorn.x86_const import (
    UC_X86_REG_CR0,
    UC_X86_REG_CR3,
    UC_X86_REG_CR4,
    UC_X86_REG_GS_BASE,
    UC_X86_REG_RAX,
    UC_X86_REG_RDI,
    UC_X86_REG_RDX,
    UC_X86_REG_RSI,
    UC_X86_REG_RSP,
)

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.machine.cpu.x86 import CR0_PAGED, CR4_PAE_PGE_SSE
from emulated_kernel.util.abi import PAGE_SIZE

TARGET = 1 / 0.9
"""Maximum ratio of the machine's time to that of bare Unicorn."""
_DATA_SIZE = 1 << 20
_ARGUMENTS = (UC_X86_REG_RDI, UC_X86_REG_RSI, UC_X86_REG_RDX)
_EFER, _LONG_MODE_NX = 0xC0000080, 0xD01


@dataclass(frozen=True)
class Work:
    """A call of a guest function that is measured; its work depends only on the arguments."""

    function: str
    arguments: tuple[int | str, ...]
    """Arguments as numbers; "data" stands for the address of the input, "out" for that of the result."""


def works(kib: int) -> list[Work]:
    """Return hash functions over `kib` KiB, and a sort that takes about as long."""
    return [
        Work("crc32_le", (0, "data", kib << 10)),
        Work("sha256", ("data", kib << 8, "out")),
        Work("test_sort", (32 * kib, 1)),
        Work("crc32_be", (0, "data", kib << 10)),
    ]


class Machines:
    """A booted kernel, and its copy in bare Unicorn."""

    def __init__(self, kernel: Kernel) -> None:
        self._machine = machine = kernel.machine
        self._symbols = kernel.image.kallsyms
        self._data = machine.alloc_pages(_DATA_SIZE + PAGE_SIZE)
        machine.memory.write(self._data, bytes(range(256)) * (_DATA_SIZE >> 8))
        # Most of the binding has no type annotations.
        uc: Any = import_module("unicorn").Uc(UC_ARCH_X86, UC_MODE_64)
        self._uc = uc
        ram = machine.memory.ram
        uc.mem_map(0, len(ram))
        for start, size in machine.memory.data_ranges():
            uc.mem_write(start, ram[start : start + size])
        uc.reg_write(UC_X86_REG_CR4, CR4_PAE_PGE_SSE)
        uc.msr_write(_EFER, _LONG_MODE_NX)
        uc.reg_write(UC_X86_REG_CR3, machine.memory.tables.root)
        uc.reg_write(UC_X86_REG_CR0, CR0_PAGED)
        uc.reg_write(UC_X86_REG_GS_BASE, machine.per_cpu_bases[0])
        # Unicorn also reads memory before the address at which a run stops, which must not begin a page.
        self._return = machine.model.layout.host_text + 64
        self._return_at = machine.memory.translate(machine.calls.stack_top)

    def _call(self, work: Work) -> tuple[int, list[int]]:
        address = self._symbols.lookup_name(work.function)
        assert address is not None, work.function
        places = {"data": self._data, "out": self._data + _DATA_SIZE}
        return address, [places[value] if isinstance(value, str) else value for value in work.arguments]

    def run(self, work: Work) -> int:
        """Call the function of `work` in the kernel, and return its result."""
        address, values = self._call(work)
        return self._machine.call(address, *values)

    def run_bare(self, work: Work) -> int:
        """Call the function of `work` in bare Unicorn, and return its result."""
        address, values = self._call(work)
        uc = self._uc
        uc.mem_write(self._return_at, self._return.to_bytes(8, "little"))
        uc.reg_write(UC_X86_REG_RSP, self._machine.calls.stack_top)
        for register, value in zip(_ARGUMENTS, values, strict=False):
            uc.reg_write(register, value)
        uc.emu_start(address, self._return)
        return int(uc.reg_read(UC_X86_REG_RAX))

    def count(self, work: Work) -> int:
        """Return the number of instructions that a call of the function of `work` executes."""
        done = 0

        def step(_uc: object, _address: int, _size: int, _data: object) -> None:
            nonlocal done
            done += 1

        # Translated code calls the hook only if the hook was there at the translation.
        self._uc.ctl_flush_tb()
        hook = self._uc.hook_add(UC_HOOK_CODE, step)
        self.run_bare(work)
        self._uc.hook_del(hook)
        self._uc.ctl_flush_tb()
        return done


def seconds(run: Callable[[Work], int], work: Work) -> float:
    """Return this thread's CPU time in seconds for `run(work)`; other load of the host does not count."""
    start = time.thread_time()
    run(work)
    return time.thread_time() - start


def measure(work: Work, machines: Machines, rounds: int) -> list[Distribution]:
    """Measure both speeds, and for each round the ratio of the machine's time to that of bare Unicorn."""
    one, other = machines.run(work), machines.run_bare(work)
    if one != other:
        raise SystemExit(f"{work.function}: {one:#x} here, {other:#x} in bare Unicorn")
    count = machines.count(work)
    machines.run_bare(work)
    pairs = [(seconds(machines.run, work), seconds(machines.run_bare, work)) for _ in range(rounds)]
    return [
        Distribution(f"{work.function}, bare", "M/s", tuple(count / bare / 1e6 for _, bare in pairs)),
        Distribution(f"{work.function}, here", "M/s", tuple(count / ours / 1e6 for ours, _ in pairs)),
        Distribution(
            f"{work.function}, time to bare's", "x", tuple(ours / bare for ours, bare in pairs), TARGET
        ),
    ]


def main() -> None:
    """Run the benchmark, and print its figures."""
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--kib", type=int, default=128, help="size of a round's input, at most 1024")
    options = parser.parse_args()
    figures: list[Distribution] = []
    with Kernel() as kernel:
        machines = Machines(kernel)
        for work in works(options.kib):
            figures += steady(options, measure, work, machines, options.rounds)
    report(figures, options)


if __name__ == "__main__":
    main()
