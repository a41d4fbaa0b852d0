"""Fprobes in guest code: one piece of code for all entries and one for all exits, and their work together
with Python.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import pytest

from emulated_kernel.arch.program.ir import AddToAbsolute, Compute, FetchAdd, SetImmediate
from emulated_kernel.arch.program.ir import Arithmetic as Op
from emulated_kernel.arch.program.ir_builder import EntryKind, ProgramBuilder
from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.fprobe import CALLED, Fprobe
from emulated_kernel.kprobes.kinds.hit_ring import HitRing
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import Profile, RegisterSaving
from emulated_kernel.util.config import MachineConfig
from tests.kprobes.return_hook.conftest import Boot, dmesg
from tests.kprobes.return_hook.test_kretprobe import address
from tests.kprobes.return_hook.test_native import counted_traps
from tests.kprobes.return_hook.test_tasks import sleepers
from tests.kprobes.test_functions import _session as session

PAIR = "[gl]c[dm]"
WAYS = {"live registers": Profile("ftrace"), "all registers": Profile("ftrace", saving=RegisterSaving.ALL)}


def warmed(kernel: Kernel, **options: int) -> tuple[Fprobe, HitRing]:
    """Register an fprobe on gcd and lcm, and call lcm, which calls gcd, until the guest code is compiled.

    Return the fprobe and the ring of its hits.
    """
    ring = kernel.hit_ring(kernel.arch.registers.return_value)
    fp = ring.fprobe(PAIR, **options)
    kernel.register_fprobe(fp)
    for _ in range(2):
        assert kernel.machine.call(address(kernel, "lcm"), 4, 6) == 12
    return fp, ring


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_entries_and_exits_stay_in_the_guest(arch: str, way: str, stack: str) -> None:
    with Kernel(MachineConfig(arch=arch, return_hook=stack), profile=WAYS[way]) as kernel:
        fp, ring = warmed(kernel)
        gcd, lcm = (address(kernel, name) for name in ("gcd", "lcm"))
        with counted_traps(kernel) as met:
            results = [kernel.machine.call(lcm, number, 6) for number in range(1, 20)]
        assert met == []
        entries = ring.entries()[-2 * len(results) :]
        assert [entry.registers[0] for entry in entries[1::2]] == results
        assert [entry.address for entry in entries] == [gcd, lcm] * len(results)
        assert (ring.hits, fp.nmissed) == (4 + 38, 0)
        assert fp.hook is not None
        assert (fp.hook.returned, fp.hook.active) == (42, 0)
        kernel.unregister_fprobe(fp)
        assert kernel.machine.text.ledger == {}


def test_a_program_for_entries(boot: Boot, stack: str) -> None:
    """An fprobe's entry program and its entry handler in Python have the same effect, and both get the
    address of the called function.
    """
    kernel = boot(return_hook=stack)
    memory = kernel.machine.memory
    hits = kernel.machine.alloc_pages(4096)
    total = hits + 8

    def entered(_fp: Fprobe, called: int, _regs: object, _data: memoryview) -> None:
        memory.write_word(hits, memory.read_u64(hits) + 1)
        memory.write_word(total, memory.read_u64(total) + called)

    def emit(builder: ProgramBuilder, way: EntryKind) -> bool:
        assert way is EntryKind.CALL
        builder.emit(AddToAbsolute(hits, 1), SetImmediate(0, total), FetchAdd(0, 0, CALLED))
        builder.emit(*(SetImmediate(vreg, -1) for vreg in range(6)), Compute(Op.SUB, 0, 1))
        return True

    fp = Fprobe(PAIR, entry_handler=entered, entry_program=emit)
    kernel.register_fprobe(fp)
    for _ in range(3):
        assert kernel.call("lcm", 4, 6) == 12
    with counted_traps(kernel) as met:
        assert kernel.machine.call(address(kernel, "lcm"), 4, 6) == 12
    assert met == []
    both = sum(address(kernel, name) for name in ("gcd", "lcm"))
    assert (memory.read_u64(hits), memory.read_u64(total)) == (8, 4 * both & (1 << 64) - 1)


@pytest.mark.parametrize("stack", ["rethook", "objpool", "instances"])
def test_calls_missed_are_counted(boot: Boot, stack: str) -> None:
    kernel = boot(return_hook=stack)
    fp, ring = warmed(kernel, nr_maxactive=1)
    for _ in range(10):
        kernel.machine.call(address(kernel, "lcm"), 4, 6)
    assert {entry.address for entry in ring.entries()} == {address(kernel, "lcm")}
    assert (ring.hits, fp.nmissed) == (12, 12)
    kernel.unregister_fprobe(fp)
    assert fp.nmissed == 12


def test_whoever_else_wants_a_site_takes_it_to_python(boot: Boot, stack: str) -> None:
    """If another fprobe or a kprobe uses a function's site, entries and returns of this function trap.

    After the other probe's end, no call traps.
    """
    kernel = boot(return_hook=stack)
    fp, ring = warmed(kernel)
    seen: list[int] = []
    other = Fprobe("gcd", entry_handler=lambda *_: seen.append(1))
    probe = Kprobe(symbol_name="lcm", pre_handler=lambda *_: seen.append(2))
    lcm = address(kernel, "lcm")

    def traps() -> int:
        hits = ring.hits
        with counted_traps(kernel) as met:
            assert kernel.machine.call(lcm, 4, 6) == 12
        assert ring.hits == hits + 2
        return len(met)

    kernel.register_fprobe(other)
    assert (traps(), seen) == (2, [1])
    kernel.register_kprobe(probe)
    assert (traps(), seen) == (4, [1, 2, 1])
    kernel.unregister_fprobe(other)
    assert (traps(), seen) == (2, [1, 2, 1, 2])
    kernel.unregister_kprobe(probe)
    assert traps() == 0
    kernel.unregister_fprobe(fp)
    assert kernel.machine.text.ledger == {}


def test_a_kernel_without_guest_code(stack: str) -> None:
    profile = Profile("python", compiled=False)
    with Kernel(MachineConfig(return_hook=stack), profile=profile) as kernel:
        _, ring = warmed(kernel)
        with counted_traps(kernel) as met:
            kernel.machine.call(address(kernel, "lcm"), 4, 6)
        assert (len(met), ring.hits) == (4, 6)


def test_disabled_and_enabled(boot: Boot, stack: str) -> None:
    kernel = boot(return_hook=stack)
    fp, ring = warmed(kernel)
    hits = ring.hits
    kernel.disable_fprobe(fp)
    for _ in range(2):
        kernel.call("gcd", 12, 18)
    assert ring.hits == hits
    kernel.enable_fprobe(fp)
    for _ in range(2):
        kernel.call("gcd", 12, 18)
    with counted_traps(kernel) as met:
        kernel.machine.call(address(kernel, "gcd"), 12, 18)
    assert (met, ring.hits) == ([], hits + 3)


def test_unregistered_while_calls_are_pending(boot: Boot, stack: str) -> None:
    kernel = boot(return_hook=stack)
    mount, ring = kernel.mount(), kernel.hit_ring("ax")
    fp = ring.fprobe("vfs_re[ab]d", nr_maxactive=4)
    kernel.register_fprobe(fp)
    pipe, clients = sleepers(mount, 4)
    assert fp.hook is not None
    assert fp.hook.code is not None
    mount.give_up(clients.pop(), pipe, errno.EINTR)
    assert (ring.hits, fp.hook.active) == (1, 3)
    kernel.unregister_fprobe(fp)
    for client in clients:
        mount.give_up(client, pipe, errno.EINTR)
    assert ring.hits == 1
    assert not [line for line in dmesg(kernel) if "BUG" in line or "Oops" in line]
    assert not kernel.kretprobes.hooks.is_used


def test_all_functions_of_a_session(boot: Boot, stack: str) -> None:
    """With all functions hooked, system calls with task switches, an exit and a fork have the same results as
    without hooks.
    """
    plain, kernel = boot(), boot(return_hook=stack)
    expected = session(plain)
    ring = kernel.hit_ring("ax")
    fp = ring.fprobe("*")
    kernel.register_fprobe(fp)
    assert session(kernel) == expected
    with counted_traps(kernel) as met:
        kernel.call("gcd", 12, 18)
    assert len(met) < 40
    assert fp.hook is not None
    hits, (returned, flushed, active) = ring.hits, (fp.hook.returned, fp.hook.flushed, fp.hook.active)
    assert hits == returned > 800
    assert flushed + active < 100
    kernel.unregister_fprobe(fp)
    assert kernel.call("gcd", 12, 18) == 6
    assert kernel.machine.text.ledger == {}


@contextmanager
def once_in_between(kernel: Kernel, act: Callable[[], object]) -> Iterator[None]:
    """Within the block, call `act` at the first change of text, as a hit on another CPU would."""
    text, done = kernel.machine.text, list[bool]()
    sync = text.sync

    def sync_and_act() -> None:
        if not done:
            done.append(True)
            act()
        sync()

    with mock.patch.object(text, "sync", sync_and_act):
        yield
    assert done


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_code_dropped_while_a_site_is_led_to_it(arch: str) -> None:
    with Kernel(MachineConfig(arch=arch)) as kernel, kernel.lock:
        fp, ring = warmed(kernel)
        lcm = address(kernel, "lcm")
        other = Fprobe("gcd", entry_handler=lambda *_: None)
        kernel.register_fprobe(other)
        with once_in_between(kernel, lambda: kernel.fprobes.handler_changed(fp)):
            kernel.unregister_fprobe(other)
        kernel.kprobes.garbage.collect()
        hits = ring.hits
        for _ in range(3):
            assert kernel.machine.call(lcm, 4, 6) == 12
        assert ring.hits == hits + 6
        kernel.unregister_fprobe(fp)
        assert kernel.machine.text.ledger == {}


@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_one_that_unregisters_itself_while_it_is_registered(arch: str) -> None:
    with Kernel(MachineConfig(arch=arch)) as kernel, kernel.lock:
        fp = Fprobe(PAIR, entry_handler=lambda *_: None)
        with once_in_between(kernel, lambda: kernel.unregister_fprobe(fp)):
            kernel.register_fprobe(fp)
        assert kernel.machine.text.ledger == {}
        assert kernel.machine.call(address(kernel, "lcm"), 4, 6) == 12
        kernel.register_fprobe(fp)
        kernel.unregister_fprobe(fp)
        assert kernel.machine.text.ledger == {}
