"""Random operations on jprobes, kprobes and kretprobes of the same functions."""

from __future__ import annotations

import errno
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from emulated_kernel.kprobes.kinds.jprobe import Jprobe
from emulated_kernel.kprobes.kinds.kretprobe import Kretprobe, KretprobeInstance
from emulated_kernel.kprobes.kprobe import Kprobe
from emulated_kernel.kprobes.profile import PROFILES
from emulated_kernel.util.abi import PAGE_SIZE
from emulated_kernel.util.errors import KernelError
from tests.kprobes.modelled import CALLS, PLACES, SELDOM, Modelled, run

FUNCTIONS = sorted(CALLS)
NAMED = st.sampled_from(FUNCTIONS)
INNER = "int_sqrt"
"""Function that some mirrors call."""
CALL = "mov {first}, {argument}; mov {scratch}, {inner}; call {scratch}"
MIRROR = """
    mov {scratch}, {cells}
    inc dword ptr [{scratch}]
    mov [{scratch} + {word}], {first}
    mov [{scratch} + {word} + {word}], {second}
    {call}
    mov {first}, 77
    mov {second}, {first}
    mov [{sp}], {second}
    mov [{sp} + {word}], {second}
    push {bx}
    mov {bx}, {first}
    stc
    mov {scratch}, {jprobe_return}
    call {scratch}
"""
"""Assembly of a function that counts and records its arguments, and then calls jprobe_return().

The function also overwrites registers, flags and its caller's stack.
"""
NAMES: dict[str, dict[str, str | int]] = {
    "x86_64": {"scratch": "rax", "bx": "rbx", "sp": "rsp", "first": "rdi", "second": "rsi", "word": 8},
    "i386": {"scratch": "ecx", "bx": "ebx", "sp": "esp", "first": "eax", "second": "edx", "word": 4},
}
CELLS_SIZE = 32
MIRROR_SIZE = 128


@cache
def assembled(arch: str, source: str) -> bytes:
    from keystone import KS_ARCH_X86, KS_MODE_32, KS_MODE_64, Ks

    code, _ = Ks(KS_ARCH_X86, KS_MODE_64 if arch == "x86_64" else KS_MODE_32).asm(source)
    assert len(code) <= MIRROR_SIZE
    return bytes(code)


class Mirror(NamedTuple):
    """The guest function of a jprobe; `calls` is True if it calls another probed function."""

    entry: int
    cells: int
    """Address of the memory for the count and the arguments."""
    function: str
    calls: bool
    """Whether the function calls INNER, whose probes miss these hits."""


class Jprobing(Modelled):
    """A state machine for kprobes, kretprobes and jprobes on the first instructions of functions."""

    profile = PROFILES["kprobes-2010"]

    def __init__(self) -> None:
        super().__init__()
        self.places = [
            addr
            for name in FUNCTIONS
            for addr in [b.addr for b in self.reference.boundaries if b.function == name][:3]
        ]
        self.mirrors: dict[Kprobe, Mirror] = {}
        self.cells = self.kernel.machine.alloc_pages(PAGE_SIZE)
        self.made: list[int] = []

    def warm_up(self) -> None:
        super().warm_up()
        # The first kretprobe allocates a trampoline, which stays allocated.
        kretprobe = Kretprobe(symbol_name="gcd")
        self.kernel.register_kretprobe(kretprobe)
        self.kernel.unregister_kretprobe(kretprobe)

    def undo(self) -> None:
        super().undo()
        for at in self.made:
            self.kernel.machine.text.free_text(at)
        self.kernel.machine.free_pages(self.cells)

    def jprobe(self, function: str, *, disabled: bool = False, calls: bool = False) -> Jprobe:
        """Return a jprobe with its own guest function. `calls`: the guest function calls INNER."""
        machine, number = self.kernel.machine, len(self.numbers)
        assert self.kernel.components.engine.jprobes is not None
        cells = self.cells + number * CELLS_SIZE
        names = NAMES[self.arch] | {
            "cells": cells,
            "jprobe_return": self.kernel.components.engine.jprobes.jprobe_return,
            "inner": self.entry(INNER),
            "argument": CALLS[INNER][0],
        }
        names["call"] = CALL.format(**names) if calls else ""
        entry = machine.text.alloc_text(MIRROR_SIZE)
        self.made.append(entry)
        machine.text.poke(entry, assembled(self.arch, MIRROR.format(**names)))
        jprobe = Jprobe(entry, symbol_name=function)
        jprobe.kp.disabled = disabled
        self.numbers[jprobe.kp], self.owners[jprobe.kp] = number, jprobe
        self.mirrors[jprobe.kp] = Mirror(entry, cells, function, calls)
        return jprobe

    def kretprobe(self, function: str, *, disabled: bool) -> Kretprobe:
        """Return a kretprobe that counts the returns."""
        number, _ = self.counter()

        def returned(_instance: KretprobeInstance, _regs: Any) -> None:
            self.hits[number] += 1

        kretprobe = Kretprobe(symbol_name=function, handler=returned, disabled=disabled)
        self.numbers[kretprobe] = number
        return kretprobe

    def has_jprobe(self, function: str) -> bool:
        point = self.model.points.get(self.entry(function))
        return point is not None and any(e.kind == "j" for e in point.entries)

    def refused(self, action: Callable[[], object], number: int) -> None:
        with pytest.raises(KernelError) as caught:
            action()
        assert caught.value.errno == number

    @initialize(numbers=st.lists(PLACES, min_size=1, max_size=4), functions=st.lists(NAMED, max_size=3))
    def begin(self, numbers: list[int], functions: list[str]) -> None:
        for number in numbers:
            self.register(number, disabled=False, stepped=number % 2 == 0)
        for function in functions:
            self.register_jprobe(function, disabled=False, calls=True)

    @rule(number=PLACES, disabled=SELDOM, stepped=SELDOM)
    def register(self, number: int, disabled: bool, stepped: bool) -> None:
        addr = self.place(number)
        kprobe = self.kprobe(addr, disabled=disabled, stepped=stepped)
        self.kernel.register_kprobe(kprobe)
        self.model.register(addr, kprobe, disabled)

    @rule(function=NAMED, disabled=SELDOM)
    def register_kretprobe(self, function: str, disabled: bool) -> None:
        kretprobe = self.kretprobe(function, disabled=disabled)
        self.kernel.register_kretprobe(kretprobe)
        self.model.register(self.entry(function), kretprobe, disabled, "r")

    @rule(function=NAMED, disabled=SELDOM, calls=st.booleans())
    def register_jprobe(self, function: str, disabled: bool, calls: bool) -> None:
        jprobe = self.jprobe(function, disabled=disabled, calls=calls)
        if self.has_jprobe(function):
            self.refused(lambda: self.kernel.register_jprobe(jprobe), errno.EEXIST)
            # As in Linux, the first probe of the address has an aggregator from now on.
            self.model.points[self.entry(function)].shared = True
            return
        self.kernel.register_jprobe(jprobe)
        self.model.register(self.entry(function), jprobe.kp, disabled, "j")

    @rule(functions=st.lists(NAMED, max_size=3), bad=st.sampled_from([0, 0, errno.ENOENT, errno.EINVAL]))
    def register_jprobes(self, functions: list[str], bad: int) -> None:
        """Register an array of jprobes, either all or none.

        A second jprobe of a function is refused, and so are an unknown name and an address within a function.
        `bad`: errno of a jprobe at the end that is refused; 0 if there is none.
        """
        jprobes = [self.jprobe(function) for function in functions]
        array, expected = [*jprobes], bad if functions else errno.EINVAL
        if bad:
            addr = None if bad == errno.ENOENT else self.places[1]
            array.append(Jprobe(1, symbol_name="no_such_function" if addr is None else None, addr=addr))
            expected = bad
        done: list[tuple[int, Kprobe]] = []
        for function, jprobe in zip(functions, jprobes, strict=True):
            if self.has_jprobe(function):
                self.model.points[self.entry(function)].shared = True
                expected = errno.EEXIST
                break
            self.model.register(self.entry(function), jprobe.kp, disabled=False, kind="j")
            done.append((self.entry(function), jprobe.kp))
        if not expected:
            self.kernel.register_jprobes(array)
            return
        self.refused(lambda: self.kernel.register_jprobes(array), expected)
        for addr, kprobe in done:
            self.model.forget(addr, kprobe)

    @rule(name=NAMED)
    def call(self, name: str) -> None:
        entered = [self.mirrors[kprobe] for kprobe in self.mirrors if self.is_entered(kprobe, name)]
        super().call(name)
        for mirror in entered:
            if mirror.calls:
                self.model.missed(self.reference.counts[INNER])
            arguments = CALLS[name]
            seen = [self.cell(mirror, at) for at in (1, 2)]
            assert all(found == a for found, a in zip(seen, arguments, strict=False) if isinstance(a, int))
        for kprobe, mirror in self.mirrors.items():
            self.hits[self.numbers[kprobe]] = self.cell(mirror, 0)

    def is_entered(self, kprobe: Kprobe, name: str) -> bool:
        addr = self.entry(name)
        if addr not in self.model.armed():
            return False
        return any(e.kprobe is kprobe and not e.disabled for e in self.model.points[addr].entries)

    def cell(self, mirror: Mirror, at: int) -> int:
        memory = self.kernel.machine.memory
        return memory.read_word(mirror.cells + at * memory.word_size)


@pytest.mark.stateful
@pytest.mark.parametrize("arch", ["x86_64", "i386"])
def test_jprobing(arch: str) -> None:
    run(Jprobing, 60, arch=arch)
