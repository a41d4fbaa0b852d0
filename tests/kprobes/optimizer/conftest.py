"""A booted kernel, and probes that record their hits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Protocol

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.probe_checks import ProbeChecker
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.optimizer.optimizer import Optimizer
from emulated_kernel.kprobes.profile import OUT_OF_TREE
from emulated_kernel.util.config import MachineConfig
from tests.kprobes.listed import list_lines
from tests.ledger import ledger_mismatches

GCD_HEAD, GCD_TAIL = 5, 8
"""Offsets in gcd: a jump at the first covers the second, and the second can have a jump, too."""


@dataclass
class Probed:
    """A kernel and the operations of tests on it; `hits` has an item for each call of a handler."""

    kernel: Kernel
    hits: list[tuple[str, int]] = field(default_factory=list)

    @property
    def optimizer(self) -> Optimizer:
        optimizer = self.kernel.kprobes.optimizer
        assert optimizer is not None
        return optimizer

    @cached_property
    def verdict(self) -> ProbeChecker[Any]:
        """Return the optimizer's probe checker.

        Without an optimizer, return a checker with the strategy of an out-of-tree patch.
        """
        kernel, kprobes = self.kernel, self.kernel.kprobes
        if kprobes.optimizer is not None:
            return kprobes.probe_checker
        strategy = kernel.arch.strategy(OUT_OF_TREE)
        return kernel.arch.probe_checker(kernel.image, strategy, ftrace=kprobes.profile.ftrace)

    def region(self, address: int) -> Region:
        """Return the region that the jump replaces at an address that can be optimized."""
        found = self.verdict.optimized_region(address)
        assert isinstance(found, Region)
        return found

    def address(self, symbol: str, offset: int = 0) -> int:
        found = self.kernel.image.kallsyms.lookup_name(symbol)
        assert found is not None
        return found + offset

    def probe(self, symbol: str, offset: int = 0, at: int | None = None, **options: Any) -> Kprobe:
        """Register a probe that records its hits as (symbol, offset).

        `at`: probed address, if several symbols have the name.
        """

        def note(_kprobe: Kprobe, _regs: Any) -> None:
            self.hits.append((symbol, offset))

        options = {"pre_handler": note, **options}
        place: dict[str, Any] = {"symbol_name": symbol, "offset": offset} if at is None else {"addr": at}
        kprobe = Kprobe(**place, **options)
        self.kernel.register_kprobe(kprobe)
        return kprobe

    def flags(self) -> dict[str, str]:
        """Return symbol+offset -> flags in kprobes/list; flags of several probes are joined by a comma."""
        found: dict[str, str] = {}
        for line in list_lines(self.kernel.kprobes):
            _, _, place, *flags = line.split()
            text = "".join(flags)
            found[place] = f"{found[place]},{text}" if place in found else text
        return found

    def text(self, symbol: str, offset: int, size: int = 5) -> bytes:
        return self.kernel.machine.text.current(self.address(symbol, offset), size)

    def gcd(self) -> list[tuple[str, int]]:
        """Call gcd(12, 18), check the result, and return the hits of the call."""
        self.hits.clear()
        address = self.address("gcd")
        assert self.kernel.machine.call(address, 12, 18) == 6
        return list(self.hits)

    def settle(self) -> None:
        """Do all pending work of the optimizer, and free code that is no longer used."""
        if self.kernel.kprobes.optimizer is not None:
            self.optimizer.work.flush()
        self.kernel.kprobes.garbage.work.flush()


class Boot(Protocol):
    def __call__(self, profile: str = ..., arch: str = ...) -> Probed: ...


@pytest.fixture
def boot() -> Iterator[Boot]:
    """Yield a function that boots a kernel with a profile and an architecture."""
    kernels: list[Kernel] = []

    def build(profile: str = "linux-6.1", arch: str = "x86_64") -> Probed:
        # A busy host may pause between two requests; only requests count here.
        kernels.append(Kernel(MachineConfig(arch=arch, profile=profile, pauses=False)))
        return Probed(kernels[-1])

    yield build
    for kernel in kernels:
        assert ledger_mismatches(kernel.machine.text) == []
        kernel.close()


@pytest.fixture
def probed(boot: Boot) -> Probed:
    """Return a kernel with the default profile."""
    return boot("linux-6.1")
