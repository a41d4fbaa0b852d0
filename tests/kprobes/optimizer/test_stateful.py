"""Random acts on overlapping probes that get optimized: text, list and hits stay what the states say."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import Any, ClassVar

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from emulated_kernel.config import MachineConfig
from emulated_kernel.errors import KernelError
from emulated_kernel.kernel import Kernel
from emulated_kernel.kprobes.kprobe import AggregatorProbe, Kprobe
from emulated_kernel.kprobes.kretprobe import Kretprobe
from tests.kprobes.optimizer.conftest import Probed

FIRST_BYTES = {"int3": 0xCC, "optimized": 0xE9, "ftrace": 0xE8}
REACH = 0x20
"""Bytes of gcd in which probes meet."""
PICKS = st.integers(0, 20)


class Optimizing(RuleBasedStateMachine):
    """Acts on a kernel with an optimizer, and compares text, list and hits with what was asked for."""

    arch: ClassVar[str]
    profile: ClassVar[str]

    def __init__(self) -> None:
        super().__init__()
        self.probed = Probed(Kernel(MachineConfig(arch=self.arch, profile=self.profile)))
        self.kernel, self.kprobes = self.probed.kernel, self.probed.kernel.kprobes
        self.passes = self._passes()
        """How often a call of gcd passes each offset that takes a probe."""
        self.probes: dict[Kprobe, int] = {}
        self.hits: Counter[Kprobe] = Counter()
        self.entries: Counter[Kprobe] = Counter()
        self.returns = 0
        self.kretprobe: Kretprobe | None = None
        # The first one makes trampolines that stay.
        self.hook_return()
        self.probed.gcd()
        self.hook_return()
        self.probed.settle()
        self.before = self._held()

    def _passes(self) -> dict[int, int]:
        passes = {}
        for offset in range(REACH):
            with suppress(KernelError):
                probe = self.probed.probe("gcd", offset)
                passes[offset] = len(self.probed.gcd())
                self.kernel.unregister_kprobe(probe)
        self.probed.settle()
        return passes

    def _held(self) -> tuple[int, int, int]:
        machine = self.kernel.machine
        return machine.text._slots.used, self.kprobes.slots.used, len(machine.breakpoints)

    def teardown(self) -> None:
        self.kprobes.set_enabled(True)
        self.kernel.unregister_kprobes(list(self.probes))
        if self.kretprobe is not None:
            self.kernel.unregister_kretprobe(self.kretprobe)
        self.probed.settle()
        self.probed.settle()
        optimizer = self.probed.optimizer
        assert (optimizer.optimizing, optimizer.unoptimizing, optimizer.freeing) == ({}, {}, {})
        assert self.kernel.machine.text.ledger == {}
        assert self.kernel.machine.text.verify() == []
        assert self.kprobes.list_text() == []
        assert self._held() == self.before
        self.kernel.close()

    def pick(self, number: int) -> Kprobe:
        return list(self.probes)[number % len(self.probes)]

    @rule(number=PICKS, disabled=st.booleans(), stepped=st.sampled_from([False, False, False, True]))
    def register(self, number: int, disabled: bool, stepped: bool) -> None:
        def hit(kprobe: Kprobe, _regs: Any) -> None:
            self.hits[kprobe] += 1

        offset = list(self.passes)[number % len(self.passes)]
        options = {"post_handler": lambda _kp, _regs: None} if stepped else {}
        probe = self.probed.probe("gcd", offset, pre_handler=hit, disabled=disabled, **options)
        self.probes[probe] = offset

    @precondition(lambda self: self.probes)
    @rule(number=PICKS)
    def unregister(self, number: int) -> None:
        probe = self.pick(number)
        del self.probes[probe]
        self.kernel.unregister_kprobe(probe)

    @precondition(lambda self: self.probes)
    @rule(number=PICKS)
    def disable(self, number: int) -> None:
        self.kernel.disable_kprobe(self.pick(number))

    @precondition(lambda self: self.probes)
    @rule(number=PICKS)
    def enable(self, number: int) -> None:
        self.kernel.enable_kprobe(self.pick(number))

    @rule(armed=st.booleans())
    def set_enabled(self, armed: bool) -> None:
        self.kprobes.set_enabled(armed)

    @rule(allowed=st.booleans())
    def set_optimization(self, allowed: bool) -> None:
        self.kprobes.set_optimization(allowed)
        head = [h for p in self.probes if isinstance(h := self.kprobes.head(p), AggregatorProbe)]
        assert allowed or not any(h.is_patched for h in head)

    @precondition(lambda self: self.probes)
    @rule(number=PICKS)
    def hold(self, number: int) -> None:
        probe = self.pick(number)
        self.kprobes.set_optimized(probe, False)
        assert not self.kprobes.is_optimized(probe)

    @precondition(lambda self: self.probes)
    @rule(number=PICKS)
    def let_go(self, number: int) -> None:
        with suppress(KernelError):
            self.kprobes.set_optimized(self.pick(number), True)

    @rule()
    def settle(self) -> None:
        self.probed.settle()
        if not self.kprobes.optimization:
            return
        for probe in self.probes:
            head = self.kprobes.head(probe)
            if isinstance(head, AggregatorProbe) and head.is_optimized:
                assert head.is_patched

    @rule()
    def hook_return(self) -> None:
        if self.kretprobe is None:
            self.kretprobe = Kretprobe(symbol_name="gcd", handler=self._returned)
            self.kernel.register_kretprobe(self.kretprobe)
        else:
            self.kernel.unregister_kretprobe(self.kretprobe)
            self.kretprobe = None

    def _returned(self, *_: object) -> None:
        self.returns += 1

    @invariant()
    def a_call_gives_its_result_and_hits(self) -> None:
        for probe, offset in self.probes.items():
            if self.kprobes.is_armed(probe) and not probe.is_disabled:
                self.entries[probe] += self.passes[offset]
        before = self.returns
        self.probed.gcd()
        for probe in self.probes:
            assert self.hits[probe] + probe.nmissed == self.entries[probe]
        assert self.returns - before == int(self.kretprobe is not None and self.kprobes.enabled)
        assert self.kprobes.hits.may_interrupt()

    @invariant()
    def text_is_as_the_probes_states_say(self) -> None:
        text, optimizer = self.kernel.machine.text, self.probed.optimizer
        assert text.verify() == []
        patched: set[int] = set()
        queues = [*optimizer.optimizing, *optimizer.unoptimizing, *optimizer.freeing]
        heads = [h for p in self.probes if (h := self.kprobes.head(p)) is not None] + queues
        for head in heads:
            first = text.current(head.address, 1)[0]
            size = 5 if head.is_ftrace else 1
            if isinstance(head, AggregatorProbe) and head.is_patched:
                assert head.detour is not None
                size = head.detour.length
                assert first == FIRST_BYTES["optimized"]
            elif self.kprobes.is_armed(head):
                assert not any(covering.is_patched for covering in optimizer.covering(head.address))
                assert first == FIRST_BYTES["ftrace" if head.is_ftrace else "int3"]
            elif head not in queues:
                continue
            patched.update(range(head.address, head.address + size))
        entry = self.probed.address("gcd")
        patched.update(range(entry, entry + 5) if self.kretprobe is not None else ())
        assert text.ledger.keys() <= patched

    @invariant()
    def list_tells_what_stands_in_the_text(self) -> None:
        optimizer, listed = self.probed.optimizer, Counter[tuple[int, bool, bool]]()
        for line in self.kprobes.list_text():
            if line.split()[1] == "k":
                listed[int(line.split()[0], 16), "[DISABLED]" in line, "[OPTIMIZED]" in line] += 1
        expected = Counter[tuple[int, bool, bool]]()
        for probe in self.probes:
            head = self.kprobes.head(probe)
            assert head is not None
            jumps = isinstance(head, AggregatorProbe) and (head.is_patched or head in optimizer.optimizing)
            expected[head.address, probe.is_disabled, jumps] += 1
        assert listed == expected


@pytest.mark.parametrize("arch", ["x86_64", "i386"])
@pytest.mark.parametrize("profile", ["linux-6.1", "linux-6.1-nopreempt"])
def test_optimizing(arch: str, profile: str) -> None:
    machine = type("Machine", (Optimizing,), {"arch": arch, "profile": profile})
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        machine,
        settings=settings(
            derandomize=True, max_examples=16, stateful_step_count=40, deadline=None, database=None
        ),
    )
