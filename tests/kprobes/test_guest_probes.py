"""Probes that a kernel module of the guest registers; hits of every mode call the handlers, which are written
in C.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from enum import IntEnum

import pytest

from emulated_kernel.kernel.api import Kernel
from emulated_kernel.kprobes.kinds.fprobe import Fprobe
from emulated_kernel.kprobes.kprobe import Kprobe, Regs
from emulated_kernel.kprobes.profile import Profile
from emulated_kernel.kprobes.return_hook.return_hooks import SHADOW_STACKS
from emulated_kernel.util.config import MachineConfig
from tests.kprobes.listed import list_lines
from tests.ledger import ledger_mismatches

COMBINATIONS = [
    ("x86_64", "linux-6.1"),
    ("x86_64", "linux-6.1-nopreempt"),
    ("x86_64", "kprobes-2010"),
    ("i386", "linux-6.1"),
    ("riscv64", "linux-6.1"),
    ("riscv64i", "riscv-optprobes-2023"),
]
BUDGET = 0.1
"""Seconds until a guest that loops is interrupted."""


class Which(IntEnum):
    """Numbers of the probes that the module `probing` can register."""

    NOTE = 0
    CHANGE = 1
    OVERRIDE = 2
    FAULT = 3
    LOOP = 4
    SLEEP = 5
    CALL = 6
    NOTE_INNER = 7
    UNKNOWN = 8
    DISABLED = 9
    NOWHERE = 10
    RETURN = 11


class Noted(IntEnum):
    """Numbers of the values that the handlers of the module `probing` record."""

    BEFORE = 0
    BEHIND = 1
    ARGUMENT = 2
    DISTANCE = 3
    RETURNS = 4
    ENTRIES = 5


class Probing:
    """A kernel in which the module `probing` is loaded."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.executive = kernel.components.guest.runner

    def register(self, which: Which) -> int:
        """Register a probe of the module; return 0 or -errno."""
        return self._int(self.kernel.call("probing_register", which))

    def unregister(self, which: Which) -> int:
        """Unregister a probe of the module; return its number of missed hits."""
        return self._int(self.kernel.call("probing_unregister", which))

    def enable(self, which: Which, enable: bool) -> int:
        """Enable or disable a probe of the module.

        Return 1 if the probe is disabled afterwards, 0 if not, or -errno.
        """
        return self._int(self.kernel.call("probing_enable", which, int(enable)))

    def many(self, bad: bool) -> int:
        return self._int(self.kernel.call("probing_register_many", int(bad)))

    @staticmethod
    def _int(value: int) -> int:
        value &= 0xFFFFFFFF
        return value - (1 << 32) if value >> 31 else value

    def noted(self, which: Noted) -> int:
        return self.kernel.call("probing_noted", which)

    def listed(self) -> list[tuple[str, str]]:
        """Return kind and place of all probes."""
        return sorted((line.split()[1], line.split()[2]) for line in list_lines(self.kernel.kprobes))


@pytest.fixture(scope="module", params=COMBINATIONS, ids="-".join)
def booted(request: pytest.FixtureRequest) -> Iterator[Kernel]:
    arch, profile = request.param
    with Kernel(MachineConfig(arch=arch, profile=profile, run_budget=BUDGET)) as kernel:
        yield kernel


@pytest.fixture
def probing(booted: Kernel) -> Iterator[Probing]:
    """Load the module, and unload it after the test. Check that no probe of the module stays registered."""
    booted.load_module("probing")
    yield Probing(booted)
    booted.unload_module("probing")
    if booted.kprobes.optimizer is not None:
        booted.kprobes.optimizer.work.flush()
    assert list(booted.kprobes) == []
    assert booted.machine.hooks.guest_callers == set()
    assert ledger_mismatches(booted.machine.text) == []
    assert booted.machine.text.ledger == {}
    assert booted.call("gcd", 12, 18) == 6
    assert booted.call("int_sqrt", 49) == 7


def optimize(kernel: Kernel) -> None:
    if kernel.kprobes.optimizer is not None:
        kernel.kprobes.optimizer.work.flush()


def test_handlers_before_and_behind(probing: Probing) -> None:
    kernel = probing.kernel
    assert probing.register(Which.NOTE) == 0
    assert probing.listed() == [("k", "gcd+0x0")]
    boosted = [kernel.kprobes.mode(each) for each in kernel.kprobes] == ["boosted"]
    assert not boosted, "a post_handler needs the step's end"
    for number in range(1, 4):
        assert kernel.call("gcd", 12 * number, 18 * number) == 6 * number
        assert [probing.noted(each) for each in (Noted.BEFORE, Noted.BEHIND)] == [number, number]
        assert probing.noted(Noted.ARGUMENT) == 12 * number
    assert probing.noted(Noted.DISTANCE) == kernel.arch.handler_ip_offset
    assert probing.enable(Which.NOTE, False) == 1
    kernel.call("gcd", 1, 1)
    assert probing.noted(Noted.BEFORE) == 3
    assert probing.enable(Which.NOTE, True) == 0
    kernel.call("gcd", 1, 1)
    assert probing.noted(Noted.BEFORE) == 4
    assert probing.unregister(Which.NOTE) == 0
    kernel.call("gcd", 1, 1)
    assert probing.noted(Noted.BEFORE) == 4


def test_registers_are_read_and_written(probing: Probing) -> None:
    """A handler in C can read and change registers at hits by a breakpoint, a call and a jump."""
    kernel = probing.kernel
    assert kernel.call("int_sqrt", 49) == 7
    assert probing.register(Which.CHANGE) == 0
    for _ in range(2):
        assert kernel.call("int_sqrt", 49) == 12
        optimize(kernel)
    assert probing.unregister(Which.CHANGE) == 0
    assert kernel.call("int_sqrt", 49) == 7


def test_a_handler_that_goes_elsewhere(probing: Probing) -> None:
    assert probing.register(Which.OVERRIDE) == 0
    first = probing.kernel.call("int_sqrt", 49)
    assert first == 77
    assert probing.unregister(Which.OVERRIDE) == 0
    assert probing.kernel.call("int_sqrt", 49) == 7


@pytest.mark.parametrize("which", [Which.FAULT, Which.LOOP, Which.SLEEP])
def test_a_handler_that_does_not_return(probing: Probing, which: Which) -> None:
    """A handler that faults, loops or sleeps is logged once and not called again, and the probed code
    continues.
    """
    kernel, notes = probing.kernel, probing.executive.notes
    before = len(notes)
    assert probing.register(which) == 0
    for _ in range(2):
        assert kernel.call("gcd", 12, 18) == 6
    told = [note.text for note in notes[before:]]
    assert len(told) == 1
    assert told[0].startswith("kprobefs: a handler of the probe at gcd was given up: ")
    assert not probing.executive.is_dead


def register(kernel: Kernel, function: str, place: str, handler: str) -> None:
    """Register a probe structure in guest memory, as a module does.

    `function`: register_kprobe or register_kretprobe. `place`: symbol of the probe. `handler`: function of
    the guest that is its pre_handler or entry_handler.
    """
    abi, memory = kernel.image.abi, kernel.machine.memory
    find = kernel.kprobes.symbols.lookup_name
    probe = kernel.machine.records.alloc_pages(4096)
    memory.write(probe, bytes([1] * 4 + [0] * 4092))
    member = "kprobe.pre_handler" if function == "register_kprobe" else "kretprobe.entry_handler"
    for name, symbol in (("kprobe.addr", place), (member, handler)):
        address = find(symbol)
        assert address is not None
        memory.write_word(probe + abi[name], address)
    assert kernel.call(function, probe) == 0


@pytest.mark.parametrize("stack", SHADOW_STACKS)
@pytest.mark.parametrize("arch", ["x86_64", "i386", "riscv64"])
def test_calls_of_a_handler_that_is_given_up_are_not_pending(arch: str, stack: str) -> None:
    """The hooked call in which a handler faults is flushed. Calls around the hit still return."""
    with Kernel(MachineConfig(arch=arch, return_hook=stack)) as kernel:
        kernel.load_module("probing")
        inner, outer = (Fprobe(name, exit_handler=lambda *_: None) for name in ("fault", "lcm"))
        for fprobe in (inner, outer):
            kernel.register_fprobe(fprobe)
        register(kernel, "register_kretprobe", "gcd", "fault")
        assert [kernel.call("lcm", 4, 6) for _ in range(3)] == [12] * 3
        assert inner.hook is not None
        assert outer.hook is not None
        assert (inner.hook.active, inner.hook.returned, inner.hook.flushed) == (0, 0, 1)
        assert (outer.hook.active, outer.hook.returned, outer.hook.flushed) == (0, 3, 0)


def test_a_hit_in_a_handler_that_is_given_up_has_ended() -> None:
    """A handler waits for a spin lock for ever. It is given up while a probed instruction of its loop is
    stepped. Later hits are not missed because of this.
    """
    profile = Profile("stepped", ftrace=False, optimizer=False)
    with Kernel(MachineConfig(run_budget=BUDGET), profile=profile) as kernel:
        start = kernel.kprobes.symbols.lookup_name("queued_spin_lock_slowpath")
        assert start is not None
        pause = kernel.machine.memory.read(start, 64).index(b"\xf3\x90")
        inner = Kprobe(symbol_name="queued_spin_lock_slowpath", offset=pause, pre_handler=lambda *_: None)
        seen: list[int] = []
        after = Kprobe(symbol_name="int_sqrt", pre_handler=lambda _kprobe, regs: seen.append(regs.di))
        for kprobe in (inner, after):
            kernel.register_kprobe(kprobe)
        register(kernel, "register_kprobe", "gcd", "_raw_spin_lock")
        for number in range(1, 4):
            assert kernel.call("gcd", 12, 18) == 6
            assert kernel.call("int_sqrt", number * number) == number
        assert seen == [1, 4, 9]
        assert inner.nmissed > 1


def test_what_a_handler_hits_is_missed(probing: Probing) -> None:
    assert probing.register(Which.CALL) == probing.register(Which.NOTE_INNER) == 0
    assert probing.kernel.call("gcd", 12, 18) == 6
    assert probing.noted(Noted.ARGUMENT) == 9
    assert probing.noted(Noted.BEFORE) == 0
    assert probing.kernel.call("int_sqrt", 100) == 10
    assert probing.noted(Noted.BEFORE) == 1
    assert probing.unregister(Which.NOTE_INNER) == 1


def test_return_probes(probing: Probing) -> None:
    kernel = probing.kernel
    assert probing.register(Which.RETURN) == 0
    assert probing.listed() == [("r", "gcd+0x0")]
    assert kernel.call("gcd", 12, 18) == 66
    assert kernel.call("gcd", 35, 49) == 7
    assert probing.noted(Noted.ARGUMENT) == 35
    assert probing.noted(Noted.DISTANCE) == 1
    assert kernel.call("gcd", 1, 3) == 1
    assert [probing.noted(each) for each in (Noted.ENTRIES, Noted.RETURNS)] == [3, 2]
    assert probing.register(Which.NOTE) == 0
    assert kernel.call("gcd", 12, 18) == 66
    assert probing.noted(Noted.BEFORE) == probing.noted(Noted.BEHIND) == 1
    assert probing.unregister(Which.RETURN) == 0
    assert kernel.call("gcd", 12, 18) == 6


def test_errors(probing: Probing) -> None:
    """Errors of registration are those of Linux, and a refused probe is not registered."""
    assert probing.register(Which.UNKNOWN) == -errno.ENOENT
    assert probing.register(Which.NOWHERE) == -errno.EINVAL
    assert probing.enable(Which.NOTE, True) == probing.enable(Which.NOTE, False) == -errno.EINVAL
    assert probing.unregister(Which.NOTE) == 0
    assert probing.listed() == []
    assert probing.register(Which.NOTE) == 0
    assert probing.register(Which.NOTE) == -errno.EINVAL
    assert probing.listed() == [("k", "gcd+0x0")]


def test_registered_disabled(probing: Probing) -> None:
    assert probing.register(Which.DISABLED) == 0
    probing.kernel.call("gcd", 12, 18)
    assert probing.noted(Noted.BEFORE) == 0
    assert probing.enable(Which.DISABLED, True) == 0
    probing.kernel.call("gcd", 12, 18)
    assert probing.noted(Noted.BEFORE) == 1


def test_arrays_are_all_or_nothing(probing: Probing) -> None:
    assert probing.many(bad=True) == -errno.ENOENT
    assert probing.listed() == []
    assert probing.many(bad=False) == 0
    assert probing.listed() == [("k", f"{name}+0x0") for name in ("gcd", "int_sqrt", "lcm")]
    probing.kernel.call("probing_unregister_many")
    assert probing.listed() == []


def test_what_is_left_goes_with_the_module(probing: Probing) -> None:
    """Probes that are still registered when the module is unloaded are unregistered; the fixture checks
    this.
    """
    assert probing.register(Which.NOTE) == probing.register(Which.RETURN) == 0
    assert len(probing.listed()) == 2


def test_a_handler_keeps_the_registers(probing: Probing) -> None:
    """A probe with handlers in C is hit between two probes in Python, which see the same registers."""
    kernel = probing.kernel
    names = kernel.arch.pt_regs
    seen: list[dict[str, int]] = []

    def see(_kprobe: Kprobe, regs: Regs) -> None:
        seen.append({name: getattr(regs, name) for name in names if hasattr(regs, name)})

    around = [Kprobe(symbol_name="gcd", pre_handler=see) for _ in range(2)]
    kernel.register_kprobe(around[0])
    assert probing.register(Which.CALL) == 0
    kernel.register_kprobe(around[1])
    for _ in range(3):
        assert kernel.call("lcm", 4, 6) == 12
        optimize(kernel)
    assert probing.noted(Noted.ARGUMENT) == 9
    assert seen[::2] == seen[1::2]
    assert len(seen) == 6
    for kprobe in around:
        kernel.unregister_kprobe(kprobe)
    assert probing.unregister(Which.CALL) == 0
