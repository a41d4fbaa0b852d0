"""Text that several CPUs execute while probes in it are armed, disarmed and optimized between any two
instructions.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from random import Random
from typing import Any
from unittest import mock

import pytest

from emulated_kernel.guests.builtin.runner.smp import SmpGuestRunner
from emulated_kernel.image.builtin_image import load_image
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.machine.machine import Machine
from emulated_kernel.machine.text.text import Text
from emulated_kernel.machine.text.text_poke import TextPoker
from emulated_kernel.machine.traps.trap import HardwareError
from emulated_kernel.util.config import ARCHITECTURES, MachineConfig
from emulated_kernel.util.errors import KernelError
from tests.ledger import ledger_mismatches
from tests.smp.conftest import Boot, clients
from tests.smp.loops import loop
from tests.smp.seeds import seeds
from tests.smp.test_races import assert_well, function_calls, together
from tests.smp.test_records import WAYS, define, offset_of, run

OPTIMIZING = {
    "x86_64": "linux-6.1",
    "i386": "linux-6.1",
    "riscv64": "riscv-optprobes-2023",
    "riscv64i": "riscv-optprobes-2023",
}
"""Architecture -> profile with an optimizer."""
ENOUGH_TURNS = 8_000
"""Limit of the turns of CPUs in a test; a correct kernel needs at most 2,200 turns."""


@contextmanager
def between_turns(kernel: Kernel, act: Callable[[], None]) -> Iterator[None]:
    """Call `act` before each turn of a CPU within the block, as if a further CPU acted."""
    executive = kernel.guest.runner
    assert isinstance(executive, SmpGuestRunner)
    find = executive._next

    def act_and_find() -> int | None:
        if find() is None:
            return None
        act()
        return find()

    with mock.patch.object(executive, "_next", act_and_find):
        yield


def test_where_nobody_can_interrupt_the_other_cpus_text_isnt_synchronised() -> None:
    image = load_image(None, "x86_64")
    with Machine(MachineConfig(), image) as machine:
        machine.text.sync()
    with Machine(MachineConfig(cpus=2), image) as machine, pytest.raises(HardwareError, match="other CPUs"):
        machine.text.sync()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_each_other_cpu_is_interrupted_to_synchronise(boot: Boot, arch: str) -> None:
    kernel = boot(3, arch)
    clients(kernel, 2)
    here = kernel.machine.cpu
    before = [kernel.guest.kernel.syncs_of(cpu) for cpu in range(3)]
    kernel.machine.text.sync()
    after = [kernel.guest.kernel.syncs_of(cpu) for cpu in range(3)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [int(cpu != here) for cpu in range(3)]
    assert kernel.machine.cpu == here


def test_an_interrupt_for_a_sync_takes_one_turn(boot: Boot) -> None:
    """The median sync takes fewer than eight runs of a CPU.

    The other CPU may end a turn before the interrupt, and may have interrupts off for some turns.
    """
    kernel = boot(2, seed=1, quantum=5, clock="virtual")
    machine, tasks = kernel.machine, clients(kernel, 2)
    turns = count()
    taken: list[int] = []

    def sync() -> None:
        if next(turns) % 10 == 5:
            with mock.patch.object(Machine, "run", autospec=True, side_effect=Machine.run) as run_guest:
                machine.text.sync()
            taken.append(run_guest.call_count)

    with (
        function_calls(kernel, tasks, "gcd", 2 * 3 * 5 * 7 * 11, 3 * 7 * 13) as calls,
        between_turns(kernel, sync),
    ):
        assert together(kernel, calls) == [21, 21]
    assert len(taken) > 5
    assert sorted(taken)[len(taken) // 2] < 8
    assert_well(kernel)


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", seeds(3, 3))
def test_patched_under_load(boot: Boot, arch: str, seed: int) -> None:
    """While two CPUs run gcd, probes in gcd are enabled, disabled and optimized between turns.

    Both CPUs compute the right result.
    """
    kernel = boot(2, arch, seed=seed, quantum=12, profile=OPTIMIZING[arch], stale_fetch=True)
    tasks, dice = clients(kernel, 2), Random(seed)
    hits: list[int] = []
    probes = [
        Kprobe(symbol_name="gcd", offset=offset, pre_handler=lambda *_: hits.append(kernel.machine.cpu))
        for offset in instructions(kernel, "gcd")
    ]
    for probe in probes:
        kernel.register_kprobe(probe)
    optimizer = kernel.kprobes.optimizer
    assert optimizer is not None

    def patch() -> None:
        action = dice.randrange(8)
        probe = dice.choice(probes)
        if action == 0:
            kernel.enable_kprobe(probe)
        elif action == 1:
            kernel.disable_kprobe(probe)
        elif action == 2:
            optimizer.work.flush()

    with between_turns(kernel, patch):
        for _ in range(8):
            with function_calls(kernel, tasks, "gcd", 2 * 3 * 5 * 7 * 11, 3 * 7 * 13) as calls:
                assert together(kernel, calls) == [21, 21]
    assert set(hits) == {0, 1}
    for probe in probes:
        kernel.unregister_kprobe(probe)
    optimizer.work.flush()
    assert ledger_mismatches(kernel.machine.text) == []
    assert_well(kernel)


def instructions(kernel: Kernel, name: str) -> list[int]:
    """Return the offsets below 40 bytes in the function `name` at which a probe can be registered."""
    start = kernel.image.kallsyms.lookup_name(name)
    assert start is not None
    found = []
    for offset in range(40):
        probe = Kprobe(addr=start + offset)
        try:
            kernel.register_kprobe(probe)
        except OSError:
            continue
        kernel.unregister_kprobe(probe)
        found.append(offset)
    return found


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize("seed", seeds(3, 3))
def test_hits_and_misses_add_up(boot: Boot, arch: str, seed: int) -> None:
    """No hit is missed if another CPU steps the same probe at the same time, because the state of handling is
    per CPU.
    """
    kernel = boot(3, arch, seed=seed, quantum=15)
    tasks = clients(kernel, 3)
    hits: list[int] = []
    behind: list[int] = []

    def pre(_kprobe: Kprobe, _regs: Any) -> None:
        hits.append(kernel.guest.kernel.current_task())

    def post(_kprobe: Kprobe, _regs: Any) -> None:
        behind.append(kernel.guest.kernel.current_task())

    probe = Kprobe(
        symbol_name="gcd", offset=instructions(kernel, "gcd")[1], pre_handler=pre, post_handler=post
    )
    kernel.register_kprobe(probe)
    for _ in range(4):
        with function_calls(kernel, tasks, "gcd", 12, 18) as calls:
            assert together(kernel, calls) == [6, 6, 6]
    assert probe.nmissed == 0
    assert sorted(hits) == sorted(behind) == sorted([task.addr for task in tasks] * 4)
    assert_well(kernel)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_left_out_sync_is_caught(arch: str) -> None:
    """The tests can find a missing sync: without syncs, CPUs execute stale instructions and the guest fails.

    CPUs execute instructions that they fetched before a jump was written or removed.
    """
    for seed in seeds(2):
        assert flipped_under_load(arch, seed, syncs=True) == "well"
    assert any(flipped_under_load(arch, seed, syncs=False) == "harmed" for seed in range(1, 5))


def flipped_under_load(arch: str, seed: int, *, syncs: bool) -> str:
    """Optimize and unoptimize a probe while two CPUs execute the probed code. Return "harmed" if the guest
    fails, else "well".

    `syncs`: whether the other CPU is interrupted after text is patched.
    """
    config = MachineConfig(cpus=2, arch=arch, seed=seed, quantum=6, stale_fetch=True, run_budget=5)
    with Kernel(config, profile=WAYS["optimized"]) as kernel:
        probe = Kprobe(symbol_name="int_sqrt", offset=offset_of(kernel, "optimized"), pre_handler=_pass)
        kernel.register_kprobe(probe)
        optimizer, dice = kernel.kprobes.optimizer, Random(seed)
        assert optimizer is not None
        code, tasks = loop(kernel), clients(kernel, 2)
        if not syncs:
            kernel.machine.text.interrupt_cpus = _pass

        turns = count(1)

        def flip() -> None:
            assert next(turns) < ENOUGH_TURNS, "a CPU has lost its way"
            if dice.randrange(8) == 0:
                optimizer.allow(not optimizer.allowed)
                optimizer.work.flush()

        try:
            with between_turns(kernel, flip):
                run(kernel, tasks, code)
            assert ledger_mismatches(kernel.machine.text) == []
            assert_well(kernel)
        except (AssertionError, KernelError, HardwareError):
            return "harmed"
        return "well"


@pytest.mark.parametrize("way", ["optimized", "called"])
@pytest.mark.parametrize("arch", ["x86_64", "riscv64"])
def test_handlers_made_under_load(arch: str, way: str) -> None:
    """Results stay right while hits compile a probe's handler again and redirect the probe's jump or call to
    the new code.

    Another CPU may have fetched all or half of the old bytes.
    """
    for seed in seeds(2):
        config = MachineConfig(cpus=2, arch=arch, seed=seed, quantum=6, stale_fetch=True, run_budget=5)
        with Kernel(config, profile=WAYS[way]) as kernel:
            define(kernel, way)
            (probe,) = kernel.kprobes
            compiler, dice = kernel.kprobes.compiler, Random(seed)
            code, tasks = loop(kernel), clients(kernel, 2)

            def change(kernel: Kernel = kernel, probe: Kprobe = probe, dice: Random = dice) -> None:
                if dice.randrange(3) == 0:
                    kernel.kprobes.handler_changed(probe)

            with between_turns(kernel, change):
                for _ in range(3):
                    run(kernel, tasks, code)
            assert compiler.made > 100
            assert ledger_mismatches(kernel.machine.text) == []
            assert_well(kernel)


@pytest.mark.parametrize("way", ["optimized", "called"])
@pytest.mark.parametrize("arch", ["riscv64", "riscv64i"])
def test_no_jump_is_led_elsewhere_around_a_cpu(arch: str, way: str) -> None:
    """A hit does not rewrite a jump while another CPU is between its auipc and jalr; a later hit compiles the
    handler.
    """
    with Kernel(MachineConfig(cpus=2, arch=arch), profile=WAYS[way]) as kernel:
        define(kernel, way)
        (probe,) = kernel.kprobes
        machine, made = kernel.machine, kernel.kprobes.compiler.made
        function = probe.address - offset_of(kernel, way)
        machine.switch_to(1)
        idle, machine.regs.ip = machine.regs.ip, probe.address + 4
        machine.switch_to(0)
        before = machine.text.current(probe.address, 8)
        assert machine.call(function, 81) == 9
        assert machine.text.current(probe.address, 8) == before
        machine.switch_to(1)
        machine.regs.ip = idle
        machine.switch_to(0)
        assert machine.call(function, 81) == 9
        assert machine.text.current(probe.address, 8) != before
        assert kernel.kprobes.compiler.made == made + 1
        assert_well(kernel)


@pytest.mark.parametrize("way", ["optimized", "called"])
@pytest.mark.parametrize("arch", ["riscv64", "riscv64i"])
def test_code_that_a_hit_drops_leads_nobody_elsewhere(arch: str, way: str) -> None:
    """If a hit drops the code of a jump while another CPU is between auipc and jalr, this CPU executes auipc
    again.

    The hit cannot wait until the other CPU has executed the jalr.
    """
    with Kernel(MachineConfig(cpus=2, arch=arch), profile=WAYS[way]) as kernel, kernel.lock:
        define(kernel, way)
        (probe,) = kernel.kprobes
        machine = kernel.machine
        function = probe.address - offset_of(kernel, way)
        for _ in range(2):
            assert machine.call(function, 81) == 9
        compiled = machine.text.current(probe.address, 8)
        dropped: list[bytes] = []

        def drop(_kprobe: Kprobe, _regs: Any) -> None:
            if not dropped:
                kernel.kprobes.handler_changed(probe)
                dropped.append(machine.text.current(probe.address, 8))

        kernel.register_kprobe(Kprobe("gcd", pre_handler=drop))
        gcd = kernel.image.kallsyms.lookup_name("gcd")
        assert gcd is not None
        machine.switch_to(1)
        idle, machine.regs.ip = machine.regs.ip, probe.address + 4
        machine.switch_to(0)
        assert machine.call(gcd, 12, 8) == 4
        assert dropped[0] != compiled
        machine.switch_to(1)
        assert machine.regs.ip == probe.address
        machine.regs.ip = idle
        machine.switch_to(0)
        assert machine.call(function, 81) == 9
        assert_well(kernel)


@pytest.mark.parametrize("way", ["optimized", "called"])
@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_code_dropped_by_a_hit_while_its_place_is_patched(arch: str, way: str) -> None:
    """If a hit drops a probe's compiled code while the probe is being disarmed, the original text is still
    restored.
    """
    with Kernel(MachineConfig(arch=arch), profile=WAYS[way]) as kernel, kernel.lock:
        define(kernel, way)
        (probe,) = kernel.kprobes
        machine, kprobes = kernel.machine, kernel.kprobes
        function = probe.address - offset_of(kernel, way)
        for _ in range(2):
            assert machine.call(function, 81) == 9
        original = machine.text.original(probe.address, 8)
        sync, inside = machine.text.sync, False

        def sync_with_hit() -> None:
            nonlocal inside
            if not inside:
                inside = True
                kprobes.handler_changed(probe)
                inside = False
            sync()

        with mock.patch.object(machine.text, "sync", sync_with_hit):
            kernel.disable_kprobe(probe)
            if kprobes.optimizer is not None:
                kprobes.optimizer.flush()
        assert machine.text.current(probe.address, 8) == original
        assert ledger_mismatches(machine.text) == []
        kernel.enable_kprobe(probe)
        assert machine.call(function, 81) == 9
        assert_well(kernel)


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_static_keys_switched_under_load(arch: str) -> None:
    """The guest stays well while the nop of a static key becomes a jump and a nop again.

    Two CPUs execute the code around the nop.
    """
    for seed in seeds(2):
        assert switched_under_load(arch, seed, stale_fetch=True) == "well"


# RISC-V has no case "breakpoints", because a half of a nop and a half of a jal do no harm together.
@pytest.mark.parametrize(
    ("arch", "left_out"),
    [*((arch, "syncs") for arch in ARCHITECTURES), ("x86_64", "breakpoints"), ("i386", "breakpoints")],
)
def test_a_static_key_switched_at_once_is_caught(
    arch: str, left_out: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def replace_all_at_once(
        poker: TextPoker, insns: Mapping[int, bytes], restored: Collection[int] = (), size: int = 0
    ) -> None:
        poker._text.poke_batch(insns.items())
        poker._text.restore_batch([*restored], size)
        poker._text.sync()

    if left_out == "breakpoints":
        monkeypatch.setattr(TextPoker, "replace_all", replace_all_at_once)
    else:
        monkeypatch.setattr(Text, "sync", _pass)
    assert switched_under_load(arch, 2, stale_fetch=True) == "harmed"


def switched_under_load(arch: str, seed: int, *, stale_fetch: bool) -> str:
    """Enable and disable an event while two CPUs execute its nop.

    Return "harmed" if the guest fails, else "well". `stale_fetch`: whether CPUs may execute bytes that were
    fetched before a write.
    """
    config = MachineConfig(
        cpus=2, arch=arch, seed=seed, quantum=6, stale_fetch=stale_fetch, run_budget=5, profile="linux-6.1"
    )
    with Kernel(config) as kernel:
        event = kernel.tracing.kprobe_events.registry.find("kmem", "kfree")
        assert event is not None
        events, dice = kernel.trace_arrays.top.events, Random(seed)
        code, tasks = loop(kernel, "kfree", 0), clients(kernel, 2)
        turns = count(1)

        def flip() -> None:
            assert next(turns) < ENOUGH_TURNS, "a CPU has lost its way"
            if dice.randrange(8) == 0:
                events.set_enabled(event, not events.is_enabled(event))

        try:
            with between_turns(kernel, flip):
                for _ in range(4):
                    run(kernel, tasks, code, results=())
            events.set_enabled(event, False)
            assert ledger_mismatches(kernel.machine.text) == []
            assert kernel.machine.text.ledger == {}
            assert sum(len(buffer) for buffer in kernel.trace.buffers) > 0
            assert_well(kernel)
        except (AssertionError, KernelError, HardwareError):
            return "harmed"
        return "well"


def _pass(*_: object) -> None:
    pass
