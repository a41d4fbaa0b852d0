"""Probes that come and go while several CPUs run the probed function: results stay right, and the probes'
memory is freed.
"""

from __future__ import annotations

from random import Random

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from tests.ledger import ledger_mismatches
from tests.smp.conftest import clients
from tests.smp.seeds import seeds
from tests.smp.test_races import assert_well, function_calls, together
from tests.smp.test_records import WAYS, booted
from tests.smp.test_text import between_turns, instructions

CPUS = 3
MAX_LIVE = 6
"""Largest number of probes that are registered at a time."""


class ComingAndGoing:
    """Makes random changes: registers, enables, disables and unregisters probes of gcd, as another CPU
    would.
    """

    def __init__(self, kernel: Kernel, way: str, seed: int) -> None:
        self.kernel = kernel
        self._dice = Random(seed)
        self._offsets = instructions(kernel, "gcd")[: 1 if way == "called" else None]
        self._live: list[Kprobe | Kretprobe] = []
        self.removed = 0

    def act(self) -> None:
        """Make at most one random change between two turns of CPUs."""
        action, kprobes = self._dice.randrange(20), self.kernel.kprobes
        if action < 3 and len(self._live) < MAX_LIVE:
            self._live.append(self._register())
        elif action < 5 and self._live:
            self._unregister(self._live.pop(self._dice.randrange(len(self._live))))
        elif action == 5:
            kprobes.garbage.work.flush()
            if kprobes.optimizer is not None:
                kprobes.optimizer.work.flush()
        elif action < 8 and self._live:
            probe = self._dice.choice(self._live)
            if isinstance(probe, Kprobe):
                (self.kernel.enable_kprobe if action == 6 else self.kernel.disable_kprobe)(probe)

    def _register(self) -> Kprobe | Kretprobe:
        kind, kernel = self._dice.randrange(4), self.kernel
        if kind == 0:
            returns = Kretprobe(symbol_name="gcd", maxactive=2, handler=self._dice.choice([None, _nothing]))
            kernel.register_kretprobe(returns)
            return returns
        offset = self._dice.choice(self._offsets)
        if kind == 1:
            ring = kernel.hit_ring(kernel.arch.registers.arguments[0], capacity=16)
            probe = ring.probe(symbol_name="gcd", offset=offset)
        else:
            probe = Kprobe(symbol_name="gcd", offset=offset, pre_handler=_nothing)
        if self._dice.randrange(3) == 0:
            probe.post_handler = _nothing
        kernel.register_kprobe(probe)
        return probe

    def _unregister(self, probe: Kprobe | Kretprobe) -> None:
        self.removed += 1
        if isinstance(probe, Kretprobe):
            self.kernel.unregister_kretprobe(probe)
        else:
            self.kernel.unregister_kprobe(probe)

    def end(self) -> None:
        """Unregister all probes, then run the optimizer and the deferred frees, so that the memory of the
        probes is freed.
        """
        kprobes = self.kernel.kprobes
        while self._live:
            self._unregister(self._live.pop())
        for _ in range(2):
            if kprobes.optimizer is not None:
                kprobes.optimizer.work.flush()
            kprobes.garbage.work.flush()


def footprint(kernel: Kernel) -> tuple[int, int]:
    """Return how many bytes of executable memory and how many breakpoints are in use, apart from compiled
    handlers.
    """
    codes = kernel.kprobes.compiler.codes
    text = kernel.machine.text._slots.used - sum(-(-code.size // 16) * 16 for code in codes)
    return text, len(kernel.machine.breakpoints) - sum(len(code.traps) for code in codes)


def _nothing(*_: object) -> None:
    pass


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", seeds(2))
def test_probes_come_and_go_under_load(arch: str, way: str, seed: int) -> None:
    with booted(CPUS, arch, way, seed, quantum=(5, 9, 20)[seed % 3]) as kernel:
        tasks = clients(kernel, CPUS)
        kprobes = kernel.kprobes
        probes = ComingAndGoing(kernel, way, seed)
        kernel.kretprobes.hooks.install()
        kprobes.garbage.work.flush()
        before = footprint(kernel)
        with between_turns(kernel, probes.act):
            for _ in range(3):
                with function_calls(kernel, tasks, "gcd", 2 * 3 * 5 * 7 * 11, 3 * 7 * 13) as calls:
                    assert together(kernel, calls) == [21] * CPUS
        assert probes.removed > 0
        probes.end()
        with function_calls(kernel, tasks, "gcd", 12, 18) as calls:
            assert together(kernel, calls) == [6] * CPUS
        assert_well(kernel)
        assert ledger_mismatches(kernel.machine.text) == []
        assert kprobes.garbage.spans == []
        assert (kprobes.slots.used, kprobes.slots.garbage, kprobes.slots.pages) == (0, 0, 1)
        assert [code for code in kprobes.compiler.codes if code.retired] == []
        assert footprint(kernel) == before
