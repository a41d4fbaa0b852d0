"""Whole functions with a probe on each instruction at once: the results are the same, and each hit is
counted.

A part of the functions is called, with probes on executed instructions. With KPROBEFS_WHOLE=1, all functions
are called, with probes on all instructions.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest

from emulated_kernel.guests.builtin.runner.guest_runner import GuestTask
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.cpu.registers import RegisterSet
from emulated_kernel.machine.machine import Machine
from emulated_kernel.util.config import MachineConfig
from tests.kprobes.blacklist import is_blacklisted
from tests.kprobes.boundaries import Boundary, all_boundaries
from tests.kprobes.conftest import BREAKPOINTS
from tests.kprobes.functions import ProbesEverywhere, Runner
from tests.kprobes.states import Arena, build_arena, generate, writable_memory
from tests.ledger import ledger_mismatches
from tests.sample import fewer, share

SEED = 62
CONFIG = MachineConfig(ram_size=24 << 20)
CONFIGS = [CONFIG, replace(CONFIG, arch="i386")]
PARTS = 36
CALLS = 2
"""Number of calls of each function, with different arguments."""
EFAULT = 14


@pytest.fixture(params=CONFIGS, ids=lambda config: config.arch)
def kernel(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    with Kernel(request.param, profile=BREAKPOINTS) as kernel:
        yield kernel


def _probeable_functions(boundaries: list[Boundary]) -> list[int]:
    """Return the first instruction that can be probed of each function."""
    entries: dict[str, int] = {}
    for boundary in boundaries:
        if boundary.refusal is None:
            entries.setdefault(boundary.function, boundary.addr)
    return list(entries.values())


def _generated_calls(machine: Machine, arena: Arena, boundaries: list[Boundary]) -> list[RegisterSet]:
    rng = Random(SEED)
    top = machine.calls.stack_top
    entries = _probeable_functions(boundaries)
    calls = CALLS if machine.model.bits == 64 else 1
    return [generate(arena, rng, entry)._replace(sp=top) for entry in entries for _ in range(calls)]


def test_functions_under_probes_everywhere(kernel: Kernel) -> None:
    machine = kernel.machine
    boundaries = all_boundaries(kernel.image)
    arena = build_arena(machine, Random(SEED), text=False)
    machine.memory.write_word(machine.calls.stack_top, machine.model.layout.host_text)
    runner = Runner(machine, writable_memory(machine, arena), boundaries)
    generated = _generated_calls(machine, arena, boundaries)
    assert len(generated) > 400
    starts = share(generated, CONFIGS.index(kernel.config), PARTS)
    all_counted = runner.counted(starts)
    counted = [(start, counts) for start, counts in all_counted if not runner.loses_flags(counts)]
    assert len(all_counted) > 0.85 * len(starts)
    assert len(counted) > 0.8 * len(starts)
    plain = [runner.call(start) for start, _ in counted]
    assert (
        sum(outcome.trap.address == machine.model.layout.host_text + 1 for outcome in plain) > len(plain) / 4
    )

    executed = {addr for _, counts in counted for addr in counts}
    rest = {b.addr for b in share(boundaries, CONFIGS.index(kernel.config), PARTS)}
    probed = [b for b in boundaries if b.addr in executed or b.addr in rest]
    with ProbesEverywhere(kernel.kprobes, probed) as probes:
        armed = {probe.address for probe in probes.probes}
        assert machine.text.ledger.keys() == armed
        for (start, counts), outcome in zip(counted, plain, strict=True):
            probes.hits.clear()
            assert runner.call(start) == outcome
            assert probes.hits == Counter({addr: n for addr, n in counts.items() if addr in armed})
    assert all(probe.nmissed == 0 for probe in probes.probes)
    _is_original(kernel)


def _is_original(kernel: Kernel) -> None:
    assert kernel.machine.text.ledger == {}
    assert ledger_mismatches(kernel.machine.text) == []
    assert kernel.kprobes.slots.used == 0
    assert len(kernel.machine.breakpoints) == 1, "the tracepoints' alone"


def test_known_functions_give_known_results_under_probes(kernel: Kernel) -> None:
    calls: list[tuple[str, tuple[int | str | bytes, ...], int]] = [
        ("strlen", ("kprobes",), 7),
        ("strcmp", ("same", "same"), 0),
        ("int_sqrt", (1 << 30,), 1 << 15),
        ("gcd", (2**10 * 9, 2**7 * 27), 2**7 * 9),
        ("crc32_le", (0xFFFFFFFF, b"123456789", 9), 0xCBF43926 ^ 0xFFFFFFFF),
        ("simple_strtoul", ("0x1f", 0, 0), 31),
    ]
    boundaries = all_boundaries(kernel.image)
    called = {name for name, *_ in calls}
    own = [b for b in boundaries if b.function in called]
    rest = share([b for b in boundaries if b.function not in called], CONFIGS.index(kernel.config), PARTS)
    with ProbesEverywhere(kernel.kprobes, [*own, *rest]) as probes:
        for name, arguments, result in calls:
            assert kernel.call(name, *arguments) == result, name
        strlen = kernel.image.kallsyms.lookup_name("strlen")
        assert probes.hits[strlen] == 1
        assert probes.behind == probes.hits.total()
    _is_original(kernel)


def _session(kernel: Kernel) -> list[object]:
    """Make system calls of a process in the guest's file system, some with bad user pointers; return their
    results.
    """
    guest, calls = kernel.guest, kernel.guest.syscalls
    results: list[object] = []
    task = guest.processes.task_of(500, 1000, 1000)
    calls.with_path(task, "mkdir", "/scratch/dir", 0o755)
    fd = calls.open(task, "/scratch/dir/file", 0o102, 0o644)
    results.append(calls.write(task, fd, b"data that is longer than a page\n" * 300))
    results.append(calls.read(task, fd, 100, offset=7))
    for buffer in (0x6000_0000_0000 >> (64 - kernel.machine.model.bits), 0x10, -4096):
        results += [_raw(kernel, task, name, fd, buffer, 32) for name in ("write", "read", "newfstat")]
    results.append(calls.look("/scratch/dir/file").size)
    results.append([entry.name for entry in calls.look_entries("/scratch/dir")])
    calls.call(task, "close", fd)
    calls.with_paths(task, "rename", "/scratch/dir/file", "/scratch/moved")
    calls.with_path(task, "unlink", "/scratch/moved")
    results.append(guest.runner.syscall(task, calls.number("clone"), 17))
    guest.processes.exit(500)
    results.append([entry.name for entry in calls.look_entries("/scratch")])
    return results


def _raw(kernel: Kernel, task: GuestTask, name: str, *args: int) -> int:
    return _as_signed(kernel, kernel.guest.runner.syscall(task, kernel.guest.syscalls.number(name), *args))


def _as_signed(kernel: Kernel, word: int) -> int:
    bits = kernel.machine.model.bits
    return word - (1 << bits) if word >> bits - 1 else word


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.arch)
def test_system_calls_under_probes_leave_the_same_machine(config: MachineConfig) -> None:
    """Two machines with the same seed, one with probes and one without, have the same results, registers and
    memory after the same system calls.
    """
    with Kernel(config) as plain, Kernel(config, profile=BREAKPOINTS) as probed:
        boundaries = all_boundaries(probed.image)
        expected = _session(plain)
        assert expected.count(-EFAULT) >= 6
        taken = share(boundaries, CONFIGS.index(config), PARTS)
        with ProbesEverywhere(probed.kprobes, taken) as probes:
            assert _session(probed) == expected
        assert probes.hits.total() > fewer(10_000, 2 * PARTS)
        assert all(probe.nmissed == 0 for probe in probes.probes)
        assert probed.machine.regs.snapshot() == plain.machine.regs.snapshot()
        assert _guest_memory(probed) == _guest_memory(plain)
        _is_original(probed)


def _guest_memory(kernel: Kernel) -> bytes:
    """Return a digest of all memory that belongs to the guest."""
    memory = kernel.machine.memory
    return hashlib.sha256(memoryview(memory.ram)[: memory.host_pages.base]).digest()


@pytest.mark.parametrize("bad", [0xFFFF_88FF_FFC0_0000, 0xFFFF_C8FF_FFD0_0000, 0x8000_0000_FFE0_0000])
def test_fault_with_a_fixup_in_a_copy_goes_on_at_the_fixup(kernel: Kernel, bad: int) -> None:
    """If the copy of an instruction with a fixup faults, the exception table is searched for the probed
    instruction.
    """
    machine = kernel.machine
    nofault = kernel.image.kallsyms.lookup_name("copy_from_kernel_nofault")
    assert nofault is not None
    target = machine.alloc_pages(64)
    probes = [Kprobe(addr=insn, post_handler=lambda *_: None) for insn, _ in kernel.image.ex_table]
    probes = [probe for probe in probes if not is_blacklisted(kernel, probe.address)]
    assert len(probes) >= 7
    hits = Counter[int]()
    for probe in probes:
        probe.pre_handler = lambda kprobe, _regs: hits.update([kprobe.address])
    kernel.register_kprobes(probes)
    assert _as_signed(kernel, machine.call(nofault, target, bad, 16)) == -EFAULT
    assert hits.total() == 1
    assert kernel.kprobes.hits.may_interrupt()
    kernel.unregister_kprobes(probes)
    _is_original(kernel)
