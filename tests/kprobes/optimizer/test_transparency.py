"""Transparency: code runs to the same end unprobed, stepped, boosted, called and optimized."""

from __future__ import annotations

import pytest

from emulated_kernel.machine.traps import GuestFault
from tests.kprobes.optimizer.conftest import Boot, Probed
from tests.kprobes.optimizer.regions import Bench, optimizable

ARCHS = ("x86_64", "i386")


def compare(probed: Probed, bench: Bench, place: tuple[str, int, int]) -> list[str]:
    """What differs between the unprobed and the optimized run of a detoured region."""
    symbol, offset, address = place
    length = probed.rules.detoured_length(address)
    assert isinstance(length, int)
    starts = [state._replace(ip=address) for state in bench.states(address)]
    end = address + length
    with bench.until(end):
        expected = [bench.expect(start) for start in starts]
    probe = probed.probe(symbol, offset, at=address)
    probed.settle()
    wrong = []
    if probed.kernel.kprobes.mode(probe) != "optimized":
        wrong.append(f"{symbol}+{offset:#x}: {probed.kernel.kprobes.reason(probe)}")
    probed.hits.clear()
    with bench.until(end):
        differ = [s for s, unprobed in zip(starts, expected, strict=True) if bench.deviation(s, unprobed)]
    if len(probed.hits) != len(starts):
        wrong.append(f"{symbol}+{offset:#x}: {len(probed.hits)} hits of {len(starts)}")
    probed.kernel.unregister_kprobe(probe)
    probed.settle()
    with bench.until(end):
        differ = [start for start in differ if not bench.reads_below_stack(start)]
    return wrong + [f"{symbol}+{offset:#x}: {start}" for start in differ]


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_optimizable_point(boot: Boot, arch: str) -> None:
    """Each detoured region of the image, from states in which it may fault too."""
    probed = boot("linux-6.1", arch)
    bench = Bench(probed)
    places = list(optimizable(probed))
    assert len(places) > 5000
    wrong = [line for place in places for line in compare(probed, bench, place)]
    assert wrong == []
    assert probed.kernel.machine.text.ledger == {}


MODES = {
    "linux-6.1": {"ftrace", "optimized", "int3"},
    "linux-6.1-nopreempt": {"ftrace", "optimized", "boosted", "int3"},
    "kprobes-2010": {"boosted", "int3"},
    "optprobes-2009": {"optimized", "boosted", "int3"},
}


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("profile", MODES)
@pytest.mark.parametrize(("function", "arguments"), [("gcd", (1071, 462)), ("int_sqrt", (1000000,))])
def test_whole_functions(
    boot: Boot, profile: str, arch: str, function: str, arguments: tuple[int, ...]
) -> None:
    """Every instruction probed alone: the result, and as many hits as the unprobed run has passes."""
    probed = boot(profile, arch)
    kernel = probed.kernel
    machine, start = kernel.machine, probed.address(function)
    found = kernel.image.kallsyms.lookup(start)
    assert found is not None
    expected, seen = machine.call(start, *arguments), set()
    for address in kernel._arch.instruction_boundaries(kernel.image.read(start, found.symbol.size), start):
        counts = []
        probe = probed.probe(function, address - start)
        for settle in (False, True):
            if settle and kernel.kprobes.optimizer is not None:
                probed.settle()
            seen.add(kernel.kprobes.mode(probe))
            probed.hits.clear()
            assert machine.call(start, *arguments) == expected, hex(address)
            counts.append(len(probed.hits))
        assert counts[0] == counts[1], hex(address)
        kernel.unregister_kprobe(probe)
    assert seen == MODES[profile]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("profile", MODES)
def test_a_step_faults_as_the_instruction_does(boot: Boot, profile: str, arch: str) -> None:
    """strlen(NULL): the same fault, and the next hit is handled; only a stepped copy passes it on."""
    probed = boot(profile, arch)
    machine, start = probed.kernel.machine, probed.address("strlen")
    probed.probe("strlen", 5)
    kprobes = probed.kernel.kprobes
    rules = kprobes.optimizer._rules if kprobes.optimizer else None
    steps = kprobes.profile.preemption and not (rules and isinstance(rules.detoured_length(start + 5), int))
    for _ in range(2):
        with pytest.raises(GuestFault) as caught:
            machine.call(start, 0)
        assert (caught.value.trap.vector, caught.value.trap.cr2) == (14, 0)
        if steps:
            assert caught.value.trap.address == start + 5
    assert len(probed.hits) == 2
