"""A hooked return can't be noticed: whole functions, all hooked at once, end as they do without."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from random import Random

import pytest

from emulated_kernel.config import MachineConfig
from emulated_kernel.errors import KernelError
from emulated_kernel.kernel import Kernel
from emulated_kernel.kprobes.kretprobe import Kretprobe
from emulated_kernel.kprobes.profile import Profile, TrampolineForm
from emulated_kernel.kprobes.return_hook.hooks import SHADOW_STACKS
from emulated_kernel.machine.cpu_x86_64 import X86_64Cpu
from emulated_kernel.machine.registers import RegisterSet
from tests.kprobes.boundaries import Boundary, all_boundaries
from tests.kprobes.functions import Outcome, Runner
from tests.kprobes.states import DIRECTION_FLAG, Arena, build_arena, generate, writable_memory

SEED = 63
LAYOUT = X86_64Cpu.layout
CONFIG = MachineConfig(ram_size=24 << 20)
NOTICES = ("panic", "free_task")
"""The one prints return addresses, where the generated format leads to the stack. The other looks for hooks
of the task that it is given, which is none, once there are any."""
FORMS = {
    "called": Profile("called"),
    "breakpoints": Profile(
        "breakpoints", ftrace=False, optimizer=False, trampoline=TrampolineForm.BREAKPOINT
    ),
    "optimized": Profile("optimized", ftrace=False),
}
"""The ways to a function's entry, with either form of the trampoline."""


@dataclass
class Bench:
    """A kernel with functions to call, and how they end when nothing is hooked."""

    kernel: Kernel
    boundaries: list[Boundary]
    arena: Arena
    calls: list[tuple[RegisterSet, dict[int, int], Outcome]]
    """Registers at the entry, how often each instruction is run, and the end."""


def _entries(boundaries: list[Boundary]) -> list[int]:
    """Of what is called; a cold part is jumped to."""
    seen: dict[str, int] = {}
    for boundary in boundaries:
        is_called = not boundary.function.endswith(".cold") and boundary.function not in NOTICES
        if boundary.refusal is None and is_called:
            seen.setdefault(boundary.function, boundary.addr)
    return list(seen.values())


def _call(state: RegisterSet, top: int) -> RegisterSet:
    """As C code calls: with the direction flag clear."""
    return state._replace(sp=top, flags=state.flags & ~DIRECTION_FLAG)


@cache
def _bench(form: str) -> Bench:
    kernel = Kernel(CONFIG, profile=FORMS[form])
    machine = kernel.machine
    boundaries = all_boundaries(kernel.image)
    arena = build_arena(machine, Random(SEED), text=False)
    machine.memory.write_u64(machine.calls.stack_top, machine.model.layout.host_text)
    runner = Runner(machine, writable_memory(machine, arena), boundaries)
    rng = Random(SEED)
    top = machine.calls.stack_top
    starts = [_call(generate(arena, rng, entry), top) for entry in _entries(boundaries)]
    switch = kernel.image.kallsyms.lookup_name("__switch_to")
    counted = [
        (start, counts)
        for start in starts
        # Memory is put back after each call, under the feet of other tasks that ran in it.
        if (counts := runner.count(start)) is not None and switch not in counts
    ]
    return Bench(
        kernel, boundaries, arena, [(start, counts, runner.call(start)) for start, counts in counted]
    )


@pytest.fixture(params=list(FORMS), scope="module")
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    yield _bench(request.param)
    _bench(request.param).kernel.close()
    _bench.cache_clear()


def _hook_all(kernel: Kernel, boundaries: list[Boundary]) -> dict[int, Kretprobe]:
    """A kretprobe on each function that takes one, by address."""
    hooked = {}
    for entry in _entries(boundaries):
        rp = Kretprobe(addr=entry, handler=lambda *_: None)
        try:
            kernel.register_kretprobe(rp)
        except KernelError:
            continue
        hooked[entry] = rp
    optimizer = kernel.kprobes.optimizer
    if optimizer is not None:
        optimizer.work.flush()
    return hooked


def _is_same_end(plain: Outcome, hooked: Outcome, trampoline: int) -> bool:
    """But for what a function sees that looks at its return address, as on Linux."""
    if (plain.trap.kind, plain.trap.address, plain.trap.vector) != (
        hooked.trap.kind,
        hooked.trap.address,
        hooked.trap.vector,
    ):
        return False
    return all(b in (a, trampoline) for a, b in zip(plain.end, hooked.end, strict=True))


def _noticed(start: RegisterSet, plain: Outcome, hooked: Outcome, own: int, trampoline: int) -> list[str]:
    """What differs; the stack below the caller's is anybody's, and of a call given up its frame too.

    `own` is the word that tells the guest of the trampoline; calls with a wild index write there too.
    """
    if not _is_same_end(plain, hooked, trampoline):
        return [f"{start.ip:#x}: {plain} became {hooked}"]
    used = {*range(start.sp - (12 << 10), start.sp + 8), *range(own, own + 8)}
    used |= {address - LAYOUT.kernel_map + LAYOUT.direct_map for address in range(own, own + 8)}
    return [
        f"{start.ip:#x}: {address:#x}: {plain.changes.get(address)} became {hooked.changes.get(address)}"
        for address in plain.changes.keys() | hooked.changes.keys()
        if address not in used and plain.changes.get(address) != hooked.changes.get(address)
    ]


@pytest.mark.parametrize("stack", [name for name in SHADOW_STACKS if name != "unified"])
def test_hooked_functions_end_as_unhooked_ones(bench: Bench, stack: str) -> None:
    kernel, hooks = bench.kernel, bench.kernel.kretprobes.hooks
    hooks.select_return_hook(stack)
    hooked = _hook_all(kernel, bench.boundaries)
    assert len(hooked) > 500
    runner = Runner(kernel.machine, writable_memory(kernel.machine, bench.arena), bench.boundaries)
    entries = dict.fromkeys(hooked, 0)
    own = kernel.image.abi["host_return_trampoline"]
    trampoline = kernel.machine.memory.read_u64(own)
    for start, counts, plain in bench.calls:
        assert _noticed(start, plain, runner.call(start), own, trampoline) == []
        for address in counts.keys() & entries.keys():
            entries[address] += counts[address]
    for address, rp in hooked.items():
        assert rp.hook is not None
        assert rp.returns + rp.nmissed + rp.hook.flushed == entries[address], hex(address)
        assert rp.hook.active == 0
    assert sum(rp.returns for rp in hooked.values()) > 2 * sum(rp.nmissed for rp in hooked.values())
    kernel.unregister_kretprobes(list(hooked.values()))
    if kernel.kprobes.optimizer is not None:
        kernel.kprobes.optimizer.work.flush()
    assert kernel.machine.text.ledger == {}
    assert kernel.machine.text.verify() == []
