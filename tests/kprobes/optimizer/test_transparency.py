"""Transparency: code ends in the same state unprobed, stepped, boosted, called and optimized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.x86.insn import iced_decoder
from emulated_kernel.machine.traps.trap import GuestFault
from tests.kprobes.optimizer.conftest import Boot, Probed
from tests.kprobes.optimizer.regions import Bench, Place, exits, instructions, is_optimizable, piece_size
from tests.sample import fewer, share

ARCHS = ("x86_64", "i386")
PARTS = 48


def compare(probed: Probed, bench: Bench, place: tuple[str, int, int]) -> list[str]:
    """Return descriptions of the differences between unprobed and optimized runs of the region at `place`."""
    symbol, offset, address = place
    starts = [state._replace(ip=address) for state in bench.states(address)]
    ends = exits(probed, address, piece_size(probed, probed.region(address)))
    with bench.until(*ends):
        expected = [bench.expect(start) for start in starts]
    probe = probed.probe(symbol, offset, at=address)
    probed.settle()
    wrong = []
    if probed.kernel.kprobes.mode(probe) != "optimized":
        wrong.append(f"{symbol}+{offset:#x}: {probed.kernel.kprobes.reason(probe)}")
    probed.hits.clear()
    with bench.until(*ends):
        differ = [s for s, unprobed in zip(starts, expected, strict=True) if bench.deviation(s, unprobed)]
    if len(probed.hits) != len(starts):
        wrong.append(f"{symbol}+{offset:#x}: {len(probed.hits)} hits of {len(starts)}")
    probed.kernel.unregister_kprobe(probe)
    probed.settle()
    with bench.until(*ends):
        differ = [start for start in differ if not bench.reads_below_stack(start)]
    return wrong + [f"{symbol}+{offset:#x}: {start}" for start in differ]


def different(probed: Probed, places: Sequence[Place]) -> Iterator[Place]:
    """Yield one of `places` for each different code that a jump can replace.

    Yield all places of code that depends on its address.
    """
    bits, seen = probed.kernel.arch.bits, set()
    for place in places:
        if not is_optimizable(probed, place):
            continue
        address = place[2]
        code = probed.region(address).code
        insns = iced_decoder(code, address, bits)
        is_fixed = any(insn.is_ip_rel_memory_operand or insn.near_branch_target for insn in insns)
        key = code, address if is_fixed else None
        if key not in seen:
            seen.add(key)
            yield place


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_optimizable_point(boot: Boot, arch: str) -> None:
    """For a part of the regions (all of them with KPROBEFS_WHOLE=1), optimized runs end as unprobed runs.

    Some of the random start states make the code fault.
    """
    probed = boot("linux-6.1", arch)
    bench = Bench(probed)
    taken = list(different(probed, share(instructions(probed), ARCHS.index(arch), PARTS)))
    assert len(taken) > fewer(10_000, PARTS)
    wrong = [line for place in taken for line in compare(probed, bench, place)]
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
    """With a probe on any one instruction, a function returns the same result.

    A breakpoint and a jump count equally many hits.
    """
    probed = boot(profile, arch)
    kernel = probed.kernel
    machine, start = kernel.machine, probed.address(function)
    found = kernel.image.kallsyms.lookup(start)
    assert found is not None
    expected, seen = machine.call(start, *arguments), set()
    for address in kernel.arch.instruction_boundaries(kernel.image.read(start, found.symbol.size), start):
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
    """A probe on the faulting instruction of strlen(NULL) leaves the fault's vector and address unchanged,
    and the next hit is handled.

    The fault of a stepped copy also has the original ip.
    """
    probed = boot(profile, arch)
    machine, start = probed.kernel.machine, probed.address("strlen")
    probed.probe("strlen", 5)
    kprobes = probed.kernel.kprobes
    detoured = isinstance(kprobes.probe_checker.optimized_region(start + 5), Region)
    steps = kprobes.profile.preemption and not detoured
    for _ in range(2):
        with pytest.raises(GuestFault) as caught:
            machine.call(start, 0)
        assert (caught.value.trap.vector, caught.value.trap.cr2) == (14, 0)
        if steps:
            assert caught.value.trap.address == start + 5
    assert len(probed.hits) == 2
