"""The checks of Linux's sanity test of kprobes, and the selftest of RISC-V's jump optimization, on kprobefs's
own kernels.

Linux: lib/test_kprobes.c (v6.1), in every profile and on every architecture. "Add OPTPROBES feature on RISCV"
(v6, 2023) adds a probe at each SYM+OFFS to the selftests.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import PROFILES
from emulated_kernel.trace.probes.trace_kprobe import KprobeTraceEvent
from emulated_kernel.util.config import ARCHITECTURES, MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.ledger import ledger_mismatches

VALUE, OTHER = 8 * 9 * 25, 48
TARGETS = {"int_sqrt": ((VALUE,), 42), "gcd": ((VALUE, OTHER), 24)}
"""Function -> its arguments in the test, and its result."""


@pytest.fixture(
    scope="module", params=[(name, arch) for name in PROFILES for arch in ARCHITECTURES], ids=", ".join
)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    profile, arch = request.param
    with Kernel(MachineConfig(arch=arch, profile=profile)) as kernel:
        yield kernel
        settle(kernel)
        assert ledger_mismatches(kernel.machine.text) == []
        assert kernel.machine.text.ledger == {}


def settle(kernel: Kernel) -> None:
    if kernel.kprobes.optimizer is not None:
        with kernel.lock:
            kernel.kprobes.optimizer.flush()


def call(kernel: Kernel, name: str) -> None:
    arguments, result = TARGETS[name]
    assert kernel.call(name, *arguments) == result


class Seen:
    """Handlers of each kind, and lists of the probe and the argument of each of their calls."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._argument = kernel.arch.registers.arguments[0]
        self.before: list[tuple[str | None, int]] = []
        self.behind: list[str | None] = []
        self.entered: list[tuple[str | None, int]] = []
        self.returned: list[tuple[str | None, int]] = []

    def pre_handler(self, kprobe: Kprobe, regs: Any) -> None:
        self.before.append((kprobe.symbol_name, getattr(regs, self._argument)))

    def post_handler(self, kprobe: Kprobe, _regs: Any) -> None:
        # The post_handler runs after the pre_handler of the same hit.
        assert len(self.behind) < len(self.before)
        self.behind.append(kprobe.symbol_name)

    def entry_handler(self, instance: Any, regs: Any) -> None:
        self.entered.append((instance.rp.symbol_name, getattr(regs, self._argument)))
        instance.data[:4] = getattr(regs, self._argument).to_bytes(4, "little")

    def handler(self, instance: Any, regs: Any) -> None:
        assert int.from_bytes(instance.data[:4], "little") == VALUE
        self.returned.append((instance.rp.symbol_name, self._kernel.regs_return_value(regs)))

    def kprobe(self, name: str) -> Kprobe:
        return Kprobe(symbol_name=name, pre_handler=self.pre_handler, post_handler=self.post_handler)

    def kretprobe(self, name: str) -> Kretprobe:
        return Kretprobe(
            symbol_name=name, entry_handler=self.entry_handler, handler=self.handler, data_size=4
        )


HIT = [(name, VALUE) for name in TARGETS]
RETURNED = [(name, result) for name, (_, result) in TARGETS.items()]


def test_kprobe(kernel: Kernel) -> None:
    seen = Seen(kernel)
    probe = seen.kprobe("int_sqrt")
    kernel.register_kprobe(probe)
    settle(kernel)
    call(kernel, "int_sqrt")
    kernel.unregister_kprobe(probe)
    call(kernel, "int_sqrt")
    assert (seen.before, seen.behind) == (HIT[:1], ["int_sqrt"])


def test_kprobes(kernel: Kernel) -> None:
    """Kprobes that were registered as an array are hit, also after one of them was disabled and enabled."""
    seen = Seen(kernel)
    probes = [seen.kprobe(name) for name in TARGETS]
    kernel.register_kprobes(probes)
    settle(kernel)
    for name in TARGETS:
        call(kernel, name)
    assert (seen.before, seen.behind) == (HIT, list(TARGETS))
    kernel.disable_kprobe(probes[0])
    for name in TARGETS:
        call(kernel, name)
    assert (seen.before, seen.behind) == ([*HIT, HIT[1]], [*TARGETS, "gcd"])
    kernel.enable_kprobe(probes[0])
    call(kernel, "int_sqrt")
    assert seen.before[3:] == HIT[:1]
    kernel.unregister_kprobes(probes)
    call(kernel, "gcd")
    assert len(seen.before) == len(seen.behind) == 4


def test_a_disabled_one_is_registered_disarmed(kernel: Kernel) -> None:
    seen = Seen(kernel)
    probe, returning = seen.kprobe("int_sqrt"), seen.kretprobe("gcd")
    probe.disabled = returning.disabled = True
    kernel.register_kprobe(probe)
    kernel.register_kretprobe(returning)
    for name in TARGETS:
        call(kernel, name)
    assert seen.before == seen.entered == []
    assert kernel.kprobes.mode(probe) == kernel.kprobes.mode(returning) == "disarmed"
    kernel.enable_kprobe(probe)
    kernel.enable_kretprobe(returning)
    settle(kernel)
    for name in TARGETS:
        call(kernel, name)
    assert (seen.before, seen.entered, seen.returned) == (HIT[:1], HIT[1:], RETURNED[1:])
    kernel.unregister_kprobe(probe)
    kernel.unregister_kretprobe(returning)


def test_kretprobe(kernel: Kernel) -> None:
    seen = Seen(kernel)
    probe = seen.kretprobe("int_sqrt")
    kernel.register_kretprobe(probe)
    settle(kernel)
    call(kernel, "int_sqrt")
    kernel.unregister_kretprobe(probe)
    call(kernel, "int_sqrt")
    assert (seen.entered, seen.returned) == (HIT[:1], RETURNED[:1])


def test_kretprobes(kernel: Kernel) -> None:
    """Kretprobes that were registered as an array are hit, with kprobes on the same functions."""
    seen = Seen(kernel)
    probes, returning = [seen.kprobe(name) for name in TARGETS], [seen.kretprobe(name) for name in TARGETS]
    kernel.register_kretprobes(returning)
    kernel.register_kprobes(probes)
    settle(kernel)
    for name in TARGETS:
        call(kernel, name)
    assert (seen.before, seen.entered, seen.returned) == (HIT, HIT, RETURNED)
    kernel.disable_kretprobe(returning[1])
    for name in TARGETS:
        call(kernel, name)
    assert seen.returned == [*RETURNED, RETURNED[0]]
    kernel.unregister_kretprobes(returning)
    kernel.unregister_kprobes(probes)
    call(kernel, "gcd")
    assert (len(seen.before), len(seen.entered)) == (4, 3)
    assert all((probe.nmissed, probe.failures) == (0, 0) for probe in (*probes, *returning))


# Each offset of a symbol


def defined(kernel: Kernel, symbol: str) -> dict[int, KprobeTraceEvent]:
    """Define an event at each offset that can be probed.

    Check that definitions at other offsets fail with the probe checker's errno.
    """
    events, found = kernel.tracing.kprobe_events, dict[int, KprobeTraceEvent]()
    start = kernel.image.kallsyms.lookup_name(symbol)
    assert start is not None
    where = kernel.image.kallsyms.lookup(start)
    assert where is not None
    boundaries = kernel.kprobes.probe_checker.boundaries(where.symbol)
    for offset in range(where.symbol.size):
        refused = kernel.kprobes.probe_checker.may_probe(start + offset)
        definition = f"p:symoffs/at_{offset} {symbol}+{offset}\n".encode()
        if refused is None:
            events.write(definition)
            assert start + offset in boundaries
            found[offset] = events.probes()[-1].event
        else:
            with pytest.raises(KernelError) as raised:
                events.write(definition)
            assert raised.value.errno == refused.errno, f"{symbol}+{offset}"
    assert len(boundaries) > len(found) / 2 > 5
    return found


def handle(event: KprobeTraceEvent) -> Kprobe:
    probe = event.probes[0].handle
    assert isinstance(probe, Kprobe)
    return probe


def hits(kernel: Kernel, symbol: str, events: dict[int, KprobeTraceEvent]) -> dict[int, int]:
    """Return offset -> number of hits during one call of the function."""
    before = {offset: event.probes[0].hits for offset, event in events.items()}
    call(kernel, symbol)
    return {offset: event.probes[0].hits - before[offset] for offset, event in events.items()}


@pytest.mark.parametrize("symbol", TARGETS)
@pytest.mark.parametrize("profile", ["riscv-optprobes-2023", "linux-6.1"])
@pytest.mark.parametrize("arch", ["riscv64", "riscv64i"])
def test_a_probe_at_each_offset(arch: str, profile: str, symbol: str) -> None:
    """Each probe is hit equally often alone, by a jump, by a breakpoint, and together with all other
    probes.
    """
    with Kernel(MachineConfig(arch=arch, profile=profile)) as kernel:
        events, kprobes, optimized = defined(kernel, symbol), kernel.kprobes, 0
        kernel.trace.expand()
        with kernel.lock:
            alone: dict[int, int] = {}
            for offset, event in events.items():
                event.enable(kernel.trace)
                settle(kernel)
                probe = handle(event)
                outcome = kprobes.probe_checker.optimized_region(probe.address)
                fentry = probe.address in kprobes.probe_checker.fentry
                has_jump = isinstance(outcome, Region)
                optimized += has_jump
                assert kprobes.mode(probe) == ("ftrace" if fentry else "optimized" if has_jump else "int3")
                assert (kprobes.reason(probe) == "") == has_jump
                alone[offset] = hits(kernel, symbol, {offset: event})[offset]
                assert hits(kernel, symbol, {offset: event})[offset] == alone[offset]
                event.disable(kernel.trace)
            assert sum(count > 0 for count in alone.values()) > len(alone) / 2
            assert (optimized > 5) == (profile == "riscv-optprobes-2023")
            for event in events.values():
                event.enable(kernel.trace)
            settle(kernel)
            assert hits(kernel, symbol, events) == alone
            if kprobes.optimizer is not None:
                kprobes.set_optimization(False)
                settle(kernel)
                assert hits(kernel, symbol, events) == alone
                assert {kprobes.mode(handle(event)) for event in events.values()} <= {"int3", "ftrace"}
            for event in events.values():
                event.disable(kernel.trace)
            assert not any(hits(kernel, symbol, events).values())
            kernel.tracing.kprobe_events.clear()
            settle(kernel)
        assert list(kprobes) == []
        assert ledger_mismatches(kernel.machine.text) == []
