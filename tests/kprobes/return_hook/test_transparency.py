"""Hooked returns are transparent: whole functions, all hooked at once, end as they do without hooks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import Profile, TrampolineForm
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.machine.cpu.x86_64 import X86_64Cpu
from emulated_kernel.machine.traps.trap import TrapKind
from emulated_kernel.util.config import MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.kprobes.boundaries import Boundary, all_boundaries
from tests.kprobes.functions import Outcome, Runner
from tests.kprobes.states import DIRECTION_FLAG, Arena, build_arena, generate, writable_memory
from tests.ledger import ledger_mismatches
from tests.sample import share

SEED = 63
LAYOUT = X86_64Cpu.layout
CONFIG = MachineConfig(ram_size=24 << 20)
NOTICES = ("panic", "free_task")
"""Functions that notice hooks. panic() prints return addresses, if its generated format names the stack.

free_task() searches a task for hooks as soon as any hook exists, but the generated argument is no task."""
FORMS = {
    "called": Profile("called", compiled=False),
    "breakpoints": Profile(
        "breakpoints", compiled=False, ftrace=False, optimizer=False, trampoline=TrampolineForm.BREAKPOINT
    ),
    "optimized": Profile("optimized", compiled=False, ftrace=False),
}
"""Name -> profile: each mode of the entry, with each form of the trampoline. Python handles all hits."""


def ways_with_stacks(ways: Mapping[str, Profile]) -> list[tuple[str, str]]:
    """Return pairs of a name in `ways` and a shadow stack that can be used together."""
    return [
        (way, name)
        for way, profile in ways.items()
        for name, stack in SHADOW_STACKS.items()
        if profile.ftrace or not stack.needs_fentry
    ]


@dataclass
class Bench:
    """A kernel, and calls of its functions with the outcomes that they have without hooks."""

    kernel: Kernel
    boundaries: list[Boundary]
    arena: Arena
    calls: list[tuple[RegisterSet, dict[int, int], Outcome]]
    """(registers at the entry, instruction -> number of executions, outcome without hooks) of each call."""


def _entries(boundaries: list[Boundary]) -> list[int]:
    """Return the entries of called functions. Cold parts are left out, because they are reached by jumps."""
    seen: dict[str, int] = {}
    for boundary in boundaries:
        is_called = not boundary.function.endswith(".cold") and boundary.function not in NOTICES
        if boundary.refusal is None and is_called:
            seen.setdefault(boundary.function, boundary.addr)
    return list(seen.values())


_GARBAGE = 2048
"""Number of bytes below the caller's frame that are overwritten."""
_OTHER_PAD = 8
"""Offset from the usual return address to another address that ends a run."""


def _call(state: RegisterSet, top: int) -> RegisterSet:
    """Return the state of a call with the stack pointer `top`. As in C code, the direction flag is clear."""
    return state._replace(sp=top, flags=state.flags & ~DIRECTION_FLAG)


@contextmanager
def benches(profile: Profile, part: int, parts: int) -> Iterator[Bench]:
    """Yield a kernel with functions to hook. Only part `part` of `parts` of all functions is called."""
    with Kernel(CONFIG, profile=profile) as kernel:
        yield _build_bench(kernel, part, parts)


def _build_bench(kernel: Kernel, part: int, parts: int) -> Bench:
    machine = kernel.machine
    # The guest gets the trampoline's address first, because calls with wild pointers read these words, too.
    kernel.kretprobes.hooks.install()
    boundaries = all_boundaries(kernel.image)
    arena = build_arena(machine, Random(SEED), text=False)
    machine.memory.write_word(machine.calls.stack_top, machine.model.layout.host_text)
    runner = Runner(machine, writable_memory(machine, arena), boundaries)
    rng = Random(SEED)
    top = machine.calls.stack_top
    entries = share(_entries(boundaries), part, parts)
    starts = [_call(generate(arena, rng, entry), top) for entry in entries]
    switch = kernel.image.kallsyms.lookup_name("__switch_to")
    # Calls that switch tasks are left out, because each call is followed by a restore of all memory.
    counted = [(start, counts) for start, counts in runner.counted(starts) if switch not in counts]
    calls = [(start, counts, runner.call(start)) for start, counts in counted]
    # A wild call may overwrite the current task, and thereby lose this task's shadow stack.
    abi = kernel.image.abi
    current = abi["percpu.base"] + abi["percpu.current_task"]
    kept = [call for call in calls if not call[2].changes.keys() & set(range(current, current + 8))]
    assert len(kept) > len(calls) - 5
    deaf = [call for call in kept if not _depends_on_return_address(kernel, runner, call[0], call[2])]
    assert len(deaf) > len(kept) * 0.9
    return Bench(kernel, boundaries, arena, deaf)


def _depends_on_return_address(kernel: Kernel, runner: Runner, start: RegisterSet, plain: Outcome) -> bool:
    """Return True if a call reads its stack as data, for example to hash memory at a wild pointer.

    Make the call with another return address, and with other bytes below the stack pointer.
    """
    memory, pad = kernel.machine.memory, kernel.machine.model.layout.host_text
    memory.write(start.sp - _GARBAGE, bytes([0xA5]) * _GARBAGE)
    memory.write_word(start.sp, pad + _OTHER_PAD)
    other = runner.call(start)
    returned = plain.trap.address == pad + 1
    address = plain.trap.address + _OTHER_PAD if returned else plain.trap.address
    ends = [end._replace(ip=0) if returned else end for end in (plain.end, other.end)]
    return (plain.trap.kind, address) != (other.trap.kind, other.trap.address) or ends[0] != ends[1]


def _counting(entries: Counter[int]) -> Callable[[Kprobe, Any], None]:
    """Return a handler that counts hits by address."""

    def count(probe: Kprobe, _regs: Any) -> None:
        entries[probe.address] += 1

    return count


def _by_python(entry: int) -> Kretprobe:
    return Kretprobe(addr=entry, handler=lambda *_: None)


def hook_all(
    kernel: Kernel, boundaries: list[Boundary], make: Callable[[int], Kretprobe] = _by_python
) -> dict[int, Kretprobe]:
    """Register a kretprobe on each function that can have one; return function -> kretprobe."""
    hooked = {}
    for entry in _entries(boundaries):
        rp = make(entry)
        try:
            kernel.register_kretprobe(rp)
        except KernelError:
            continue
        hooked[entry] = rp
    optimizer = kernel.kprobes.optimizer
    if optimizer is not None:
        optimizer.work.flush()
    return hooked


def _is_same_end(start: RegisterSet, plain: Outcome, hooked: Outcome, trampoline: int) -> bool:
    """Return True if a hooked call ends as the plain one.

    As on Linux, the guest may see the trampoline as return address; for faults, see _of_copy().
    """
    end, trap = _of_copy(start, plain, hooked)
    if (plain.trap.kind, plain.trap.address, plain.trap.vector, plain.trap.cr2) != (
        hooked.trap.kind,
        trap,
        hooked.trap.vector,
        hooked.trap.cr2,
    ):
        return False
    return all(b in (a, trampoline) for a, b in zip(plain.end, end, strict=True))


def _of_copy(start: RegisterSet, plain: Outcome, hooked: Outcome) -> tuple[RegisterSet, int]:
    """Return registers and trap address of the hooked call.

    As on Linux, the first instruction's fault may be in its copy, and is returned with the original address.
    """
    address = hooked.trap.address
    if plain.trap.kind == TrapKind.FAULT and plain.trap.address == start.ip and hooked.end.ip == address:
        return hooked.end._replace(ip=start.ip), start.ip
    return hooked.end, address


def _noticed(start: RegisterSet, plain: Outcome, hooked: Outcome, own: int, trampoline: int) -> list[str]:
    """Return descriptions of the differences; `own` is the address of the word that names the trampoline to
    the guest.
    """
    if not _is_same_end(start, plain, hooked, trampoline):
        return [f"{start.ip:#x}: {plain} became {hooked}"]
    return changes_noticed(start, plain, hooked, [own])


def changes_noticed(start: RegisterSet, plain: Outcome, hooked: Outcome, own: list[int]) -> list[str]:
    """Return descriptions of the differences in memory, except below the caller's frame.

    The words at the addresses `own` are also left out, because calls with a wild index write to them.
    """
    words = [address + at for address in own for at in range(8)]
    used = {*range(start.sp - (12 << 10), start.sp + 8), *words}
    used |= {address - LAYOUT.kernel_map + LAYOUT.direct_map for address in words}
    return [
        f"{start.ip:#x}: {address:#x}: {plain.changes.get(address)} became {hooked.changes.get(address)}"
        for address in plain.changes.keys() | hooked.changes.keys()
        if address not in used and plain.changes.get(address) != hooked.changes.get(address)
    ]


CASES = ways_with_stacks(FORMS)


@pytest.mark.parametrize(("form", "stack"), share(CASES, 0, 6))
def test_hooked_functions_end_as_unhooked_ones(form: str, stack: str) -> None:
    """All functions are hooked; each case calls another part of the functions."""
    with benches(FORMS[form], CASES.index((form, stack)), len(CASES)) as bench:
        _end_as_unhooked(bench, stack)


def _end_as_unhooked(bench: Bench, stack: str) -> None:
    kernel, hooks = bench.kernel, bench.kernel.kretprobes.hooks
    hooks.select_return_hook(stack)
    hooked = hook_all(kernel, bench.boundaries)
    assert len(hooked) > 500
    runner = Runner(kernel.machine, writable_memory(kernel.machine, bench.arena), bench.boundaries)
    entries: Counter[int] = Counter()
    counting = [Kprobe(addr=address, pre_handler=_counting(entries)) for address in hooked]
    for probe in counting:
        kernel.register_kprobe(probe)
    own = kernel.image.abi["host_return_trampoline"]
    trampoline = kernel.machine.memory.read_u64(own)
    for start, _, plain in bench.calls:
        assert _noticed(start, plain, runner.call(start), own, trampoline) == []
    assert entries.total() > len(bench.calls)
    for address, rp in hooked.items():
        assert rp.hook is not None
        assert rp.returns + rp.nmissed + rp.hook.flushed == entries[address], hex(address)
        assert rp.hook.active == 0
    assert sum(rp.returns for rp in hooked.values()) > 2 * sum(rp.nmissed for rp in hooked.values())
    kernel.unregister_kretprobes(list(hooked.values()))
    for probe in counting:
        kernel.unregister_kprobe(probe)
    if kernel.kprobes.optimizer is not None:
        kernel.kprobes.optimizer.work.flush()
    assert kernel.machine.text.ledger == {}
    assert ledger_mismatches(kernel.machine.text) == []
