"""The extended strategy: jumps at places that Linux refuses change no result of the probed code."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import pytest

from emulated_kernel.arch.analysis.detour_region import Region
from emulated_kernel.arch.analysis.tactic import Tactic
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError, WouldBlock
from emulated_kernel.vfs.core.client import Client
from tests.kprobes.optimizer.conftest import Probed
from tests.kprobes.optimizer.regions import Bench, instructions, is_optimizable
from tests.kprobes.optimizer.test_in_kernel import Files
from tests.kprobes.optimizer.test_transparency import compare
from tests.ledger import ledger_mismatches
from tests.sample import fewer

ARCHS = ("x86_64", "i386", "riscv64")
ROUNDS = fewer(2000, 200)
"""Number of places of each tactic whose runs are compared."""


@pytest.fixture(scope="module", params=ARCHS)
def extended(request: pytest.FixtureRequest) -> Iterator[Probed]:
    with Kernel(MachineConfig(arch=request.param, strategy="extended")) as kernel:
        yield Probed(kernel)
        assert ledger_mismatches(kernel.machine.text) == []


def places(probed: Probed) -> Iterator[tuple[tuple[str, int, int], set[Tactic]]]:
    """Yield places that only the extended strategy optimizes, with their tactics, spread over the image."""
    known = list(instructions(probed))
    step = 97
    for place in (place for first in range(step) for place in known[first::step]):
        if is_optimizable(probed, place) and probed.region(place[2]).tactics:
            yield place, set(probed.region(place[2]).tactics)


def test_transparent_with_each_tactic(extended: Probed) -> None:
    """With jumps of each tactic, the probed code ends in the same state as without a probe.

    kprobefs's own images have no return thunks, but Debian's kernel has them. Only the x86_64 image has
    enough punned jumps.
    """
    if extended.kernel.arch.name == "riscv64":
        pytest.skip("jumps of RISC-V overwrite registers that are free; see exhaustion/test_protocol.py")
    bench = Bench(extended)
    rare = {Tactic.RETURN_THUNK} if extended.kernel.arch.bits == 64 else {Tactic.RETURN_THUNK, Tactic.PUNNED}
    left = dict.fromkeys(set(Tactic) - rare, ROUNDS)
    wrong = []
    for place, tactics in places(extended):
        if any(left.get(tactic) for tactic in tactics):
            for tactic in tactics:
                left[tactic] = max(left[tactic] - 1, 0)
            wrong += compare(extended, bench, place)
        if not any(left.values()):
            break
    assert wrong == []
    assert [tactic for tactic, number in left.items() if number == ROUNDS] == []
    assert extended.kernel.machine.text.ledger == {}


def relocated_calls(probed: Probed, function: str) -> list[int]:
    """Return the offsets of a function's places whose detours end in a relocated call."""
    start = probed.address(function)
    inside = (place for place in instructions(probed) if place[0] == function)
    return [address - start for *_, address in filter(partial(ends_in_call, probed), inside)]


def ends_in_call(probed: Probed, place: tuple[str, int, int]) -> bool:
    if not is_optimizable(probed, place):
        return False
    arch, region = probed.kernel.arch, probed.region(place[2])
    buffer = region.addr + (1 << 20)
    detour = arch.detour(region, buffer)
    copied = range(buffer + detour.copied, buffer + len(detour.code))
    return any(arch.original_place(region, copied.start, at).is_calling for at in copied)


def test_a_task_asleep_in_a_relocated_call(extended: Probed) -> None:
    """The detour of a task that sleeps in a relocated call is freed at once.

    No address on the task's stack is in the detour: the call returns into the original code.
    """
    kernel = extended.kernel
    mount = kernel.mount()
    clients = [Client(900 + number, 0, 0) for number in range(3)]
    pipe = mount.open(clients[0], "/tracing/trace_pipe", os.O_RDONLY)
    probes = [
        extended.probe(function, offset)
        for function in ("vfs_read", "ksys_read")
        for offset in relocated_calls(extended, function)
    ]
    extended.settle()
    detours = [kernel.kprobes.detour(probe) for probe in probes if kernel.kprobes.mode(probe) == "optimized"]
    extended.hits.clear()
    for client in clients:
        with pytest.raises(WouldBlock):
            mount.read(client, pipe, 100, 0)
    hits = list(extended.hits)
    assert len(hits) >= len(clients)
    spans = [(detour.address, detour.address + detour.size) for detour in detours if detour is not None]
    assert kernel.kprobes.garbage._scheduler.is_quiescent(spans)
    for probe in probes:
        kernel.unregister_kprobe(probe)
    extended.settle()
    assert kernel.machine.text.ledger == {}
    filler = kernel.machine.model.filler
    assert all(kernel.machine.text.current(start, len(filler)) == filler for start, _ in spans)
    for client in clients:
        mount.give_up(client, pipe, errno.EINTR)
    assert extended.hits == hits
    assert "Oops" not in Files(kernel).read("/machine/dmesg")


def test_the_files_name_the_tactics(extended: Probed) -> None:
    files = Files(extended.kernel)
    assert files.read("/machine/version").splitlines()[1] == "profile linux-6.1, strategy extended"
    offset = relocated_calls(extended, "vfs_read")[0]
    files.write("/kprobe_events", f"p:far vfs_read+{offset}")
    files.write("/tracing/events/kprobes/far/enable", "1")
    extended.settle()
    assert f"vfs_read+{offset:#x}    [OPTIMIZED]" in files.read("/kprobes/list")
    reason = files.read("/kprobes/stats/kprobes/far/reason")
    assert Tactic.RELOCATED_BRANCH.value in reason
    assert "(Linux: vfs_read+0x" in reason
    detour = files.read("/kprobes/stats/kprobes/far/detour")
    assert "copied instructions:" in detour
    copied = detour.split("copied instructions:")[1].split("jump back:")[0]
    assert ("push" if extended.kernel.arch.registers.link is None else "auipc") in copied
    files.write("/tracing/events/kprobes/far/enable", "0")
    files.write("/kprobe_events", "-:far")
    extended.settle()


@pytest.mark.parametrize(
    "config", [{"strategy": "none"}, {"strategy": "extended", "profile": "djprobe-2007"}]
)
def test_what_has_no_such_strategy(config: dict[str, str]) -> None:
    with pytest.raises(KernelError) as caught:
        Kernel(MachineConfig(**config))  # type: ignore[arg-type]
    assert caught.value.errno == errno.EINVAL


def punned_places(probed: Probed, kept: int) -> Iterator[int]:
    """Yield the addresses whose jump keeps `kept` bytes of the code after the replaced instructions."""
    for _, _, address in instructions(probed):
        region = probed.verdict.optimized_region(address)
        if isinstance(region, Region) and region.kept == kept:
            yield address


@pytest.fixture(scope="module")
def punned() -> Iterator[Probed]:
    with Kernel(MachineConfig(strategy="extended")) as kernel:
        yield Probed(kernel)
        assert ledger_mismatches(kernel.machine.text) == []


def test_a_punned_jump_comes_and_goes(punned: Probed) -> None:
    """A punned jump changes only bytes of the replaced instructions.

    The optimizer waits for no CPU at the instruction whose bytes the jump keeps.
    """
    kernel = punned.kernel
    text = kernel.machine.text
    for kept in (1, 2, 3):
        address = next(punned_places(punned, kept))
        before = text.current(address, 5)
        pages = text.generated
        probe = punned.probe("punned", at=address)
        with spans_asked(punned) as asked:
            punned.settle()
        region = punned.region(address)
        assert region.end == address + 5 - kept
        spans = [span for span in asked if span[0] <= region.end <= span[1]]
        assert all(end <= region.end for _, end in spans)
        assert any(start == address + 1 for start, _ in asked) or region.end == address + 1
        jump = text.current(address, 5)
        assert (jump[0], jump[-kept:]) == (0xE9, before[-kept:])
        assert set(text.ledger) <= set(range(address, region.end))
        reason = kernel.kprobes.reason(probe)
        assert Tactic.PUNNED.value in reason
        kernel.unregister_kprobe(probe)
        punned.settle()
        assert text.current(address, 5) == before
        assert text.generated == pages


@contextmanager
def spans_asked(probed: Probed) -> Iterator[list[tuple[int, int]]]:
    """Yield a list of the address ranges that must be quiescent before jumps are written."""
    scheduler = probed.optimizer._scheduler
    asked: list[tuple[int, int]] = []
    really = scheduler.is_quiescent

    def is_quiescent(spans: Sequence[tuple[int, int]]) -> bool:
        asked.extend(spans)
        return really(spans)

    scheduler.is_quiescent = is_quiescent
    yield asked
    scheduler.is_quiescent = really


def test_all_five_bytes_are_reserved(punned: Probed) -> None:
    """A probe at the instruction that a punned jump keeps prevents the jump.

    After this probe is unregistered, enabling the first probe again brings the jump back.
    """
    kernel = punned.kernel
    address = next(punned_places(punned, 2))
    region = punned.region(address)
    probe = punned.probe("punned", at=address)
    punned.settle()
    assert kernel.kprobes.mode(probe) == "optimized"
    neighbour = punned.probe("neighbour", at=region.end)
    assert kernel.kprobes.mode(probe) != "optimized"
    punned.settle()
    assert kernel.kprobes.mode(probe) != "optimized"
    kernel.disable_kprobe(probe)
    kernel.enable_kprobe(probe)
    punned.settle()
    assert kernel.kprobes.mode(probe) != "optimized"
    kernel.unregister_kprobe(neighbour)
    punned.settle()
    kernel.disable_kprobe(probe)
    kernel.enable_kprobe(probe)
    punned.settle()
    assert kernel.kprobes.mode(probe) == "optimized"
    kernel.unregister_kprobe(probe)
    punned.settle()
    assert kernel.machine.text.ledger == {}


def test_no_jump_where_somebody_else_has_changed_the_kept_bytes(punned: Probed) -> None:
    kernel = punned.kernel
    text = kernel.machine.text
    address = next(punned_places(punned, 2))
    end = punned.region(address).end
    before = text.current(end, 1)
    probe = punned.probe("punned", at=address)
    text.substitute(end, b"\xcc")
    punned.settle()
    assert text.current(address, 1) == b"\xcc"
    where = kernel.image.kallsyms.lookup(end)
    assert where is not None
    patched = f"{where.name}+{where.offset:#x}: another debugger has patched the bytes"
    assert kernel.kprobes.reason(probe) == patched
    text.substitute(end, before)
    kernel.disable_kprobe(probe)
    kernel.enable_kprobe(probe)
    punned.settle()
    assert kernel.kprobes.mode(probe) == "optimized"
    kernel.unregister_kprobe(probe)
    punned.settle()


def test_two_detours_that_need_the_same_address(punned: Probed) -> None:
    """If the only address for a detour is taken, the probe stays a breakpoint, and `reason` says why.

    Once the memory is free, a new probe gets its jump.
    """
    kernel = punned.kernel
    text = kernel.machine.text
    address = next(punned_places(punned, 4))
    starts = kernel.arch.detour_starts(punned.region(address))
    assert starts is not None
    assert len(starts) == 1
    taken = text.alloc_text(16, starts)
    probe = punned.probe("punned", at=address)
    punned.settle()
    assert kernel.kprobes.mode(probe) in ("int3", "boosted")
    assert "no executable memory left for a detour buffer where" in kernel.kprobes.reason(probe)
    kernel.unregister_kprobe(probe)
    text.free_text(taken)
    probe = punned.probe("punned", at=address)
    punned.settle()
    assert kernel.kprobes.mode(probe) == "optimized"
    kernel.unregister_kprobe(probe)
    punned.settle()
